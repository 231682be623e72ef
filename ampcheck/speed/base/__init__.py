"""Did a change make it slower? Two revisions of a repository, measured in one job in processes that take turns."""

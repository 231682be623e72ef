"""Since when? The first commit of a range in which the verdict about a target changed."""

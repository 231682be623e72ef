"""The guards: what a block of code does with autocast, noted while it runs (`ops`, `hooks`), then judged (`checks`)."""

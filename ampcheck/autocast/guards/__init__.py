"""Use of autocast by a block of code: recorded while it runs (`recorder`, `hooks`), then judged (`guard`)."""

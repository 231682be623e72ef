"""How a block of code uses autocast: recorded while it runs (`recorder`, `hooks`), then judged (`checks`)."""

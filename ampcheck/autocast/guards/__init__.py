"""How a block of code uses autocast: recorded while it runs (`guard`, `recorder`), then judged (`checks`)."""

"""`ampcheck.watch` as a callback of the libraries that own the training loop; each module needs its library."""

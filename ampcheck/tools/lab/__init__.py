"""The classic experiments of mixed precision, to be seen: what formats, autocast and the compiler do here."""

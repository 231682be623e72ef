"""The classic experiments of mixed precision: what formats, autocast and the compiler do on this machine, to be "
"seen.""seen."""

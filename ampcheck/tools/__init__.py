"""Clients of the public names and of Run JSON: init, doctor, lab, known, sweep and bisect."""

"""Clients of the public names and of Run JSON: init, doctor, lab, sweep and bisect."""

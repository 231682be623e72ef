"""What torch.compile and autocast are worth: a row of figures for one model, tables over many."""

"""Gains of torch.compile and autocast: a row of figures for one model, tables over many."""

"""The dtypes of the tensors that live across steps."""

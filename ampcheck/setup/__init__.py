"""What tests import that `ampcheck init` has written."""

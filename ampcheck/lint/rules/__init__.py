"""The rules of `ampcheck lint`: one file each."""

"""Does a compiled model stay in its graphs? What Dynamo tells and what then really runs; see `judge`."""

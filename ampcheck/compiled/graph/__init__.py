"""Does a compiled model stay in its graphs? What Dynamo reports and what then really runs; see `judge`."""

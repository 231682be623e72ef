"""Is compiled code as good as eager mode, both held against float64? See `judge`, and `ladder` for its stages."""

"""Time, curves and the cost model that connects them."""

"""writehead: multi-query attention turned into speed."""

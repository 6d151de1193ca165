"""Measuring the fast path on a GPU: yardsticks, the table of rows, and one check of everything."""

"""Bookkeeping that has no slow or fast form: pure Python and integers, used by `reference` and `fast` alike."""

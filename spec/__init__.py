"""The specification: `contract` holds the names, `CLAUSES` the labels, and the numbered chapters the text that runs."""

"""The second definition of every expectation: other algorithms, no step code in common with the first (design, 6).

Same names, arguments and results as the operations, plus `chunk` where a chunk length exists; arguments are taken as
checked. Nothing computed here is stored: it only has to agree, bit for bit for exact vectors, else within 2^-46 of the
noise gain. So this is no golden path, and libraries may sum and exponentiate as they like.
"""

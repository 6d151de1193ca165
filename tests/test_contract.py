"""The contract is one table: what is made from it agrees with it."""

from statescan.goldens import schemas
from statescan.spec import contract


def test_stored_schemas_are_those_of_the_table():
    for name, schema in schemas.schemas().items():
        stored = (schemas.FOLDER / f"{name}.schema.json").read_text("utf-8")
        assert stored == schemas.text(schema), f"run python -m statescan.goldens.schemas ({name})"


def test_clause_list_is_append_only_in_form():
    seen: dict[str, int] = {}
    for clause in contract.CLAUSES.values():
        number = int(clause.label.rpartition("-")[2])
        assert number == seen.get(clause.family, 0) + 1, f"{clause.label}: numbers run from 1 without holes"
        seen[clause.family] = number
        assert clause.state in ("planned", "active") or clause.state.startswith("retired -> ")


def test_every_axis_letter_of_the_table_is_explained():
    letters = {word for op in contract.OPERATIONS.values() for a in op.tensors for shape in a.alternatives
               for size in shape for word in size.replace("+1", "").split("*") if word.isalpha()}  # fmt: skip
    unexplained = letters - {"X", "I", "D", "group"} - set((contract.__doc__ or "").split())
    assert not unexplained


def test_errors_keep_upstreams_built_in_types():
    assert issubclass(contract.PackingError, RuntimeError)
    assert issubclass(contract.HeterogeneousStackError, AssertionError)
    assert issubclass(contract.UnsupportedError, NotImplementedError)
    assert issubclass(contract.UnsupportedError, AssertionError)
    assert all(issubclass(error, ValueError) for error in contract.ERRORS)


def test_chunking_is_a_tuple_in_the_seeds_order():
    assert contract.SSMChunking(128, 64, 3) == (128, 64, 3)
    assert contract.SSMChunking._fields == ("chunk_size", "inference_chunk_size", "num_householder")

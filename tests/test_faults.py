"""faults.toml fits the code: what tests/faults.py applies is still there."""

import ast

from faults import find_fault, read_faults


def test_each_fault_is_a_change_of_one_place_that_python_accepts():
    faults = read_faults()
    assert len({fault.number for fault in faults}) == len(faults)
    for fault in faults:
        module, faulty = find_fault(fault)  # raises unless there is exactly one
        ast.parse(faulty, str(module))

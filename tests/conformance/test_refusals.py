"""What the reference refuses, vecsim refuses; what is not built yet is named as such."""

import pytest

from tests.conformance.support import FIELDS, all_cases, files_of, name, unbuilt
from vecsim.errors import InputError, NotSupportedYetError
from vecsim.run.replay import replay

REFUSED = [
    c for c in all_cases() if c["expect"]["error_kind"] == "validation" and "deviation" not in c
]
MISSING = [c for c in all_cases() if c["expect"]["error_kind"] != "validation" and unbuilt(c)]
pytestmark = pytest.mark.filterwarnings("ignore:keys without effect")


@pytest.mark.parametrize("case", REFUSED, ids=name)
def test_refused_as_input(case, tmp_path):
    with files_of(case, tmp_path) as payload, pytest.raises(InputError) as refusal:
        replay(payload)
    if not unbuilt(case):
        assert not isinstance(refusal.value, NotSupportedYetError)
    assert refusal.value.where
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("case", MISSING, ids=name)
def test_not_supported_yet(case, tmp_path):
    with files_of(case, tmp_path) as payload, pytest.raises(NotSupportedYetError) as refusal:
        replay(payload)
    where = refusal.value.where
    assert any(FIELDS[feature][0] in where for feature in unbuilt(case)), where
    assert str(refusal.value).startswith("not supported yet: ")

"""The sites that these tests train with."""

from __future__ import annotations

import pytest

from tests.federated.kit import World, world


@pytest.fixture(scope="session")
def there(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(tmp_path_factory.mktemp("federated"))

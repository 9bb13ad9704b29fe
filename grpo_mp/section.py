"""What every section of the settings is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; an unknown name is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

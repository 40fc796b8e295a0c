"""Whether a shard is still what a run has read of it."""

from typing import NamedTuple

from train.errors import RunError


class Version(NamedTuple):
  """What tells one content of a file from another.

  size: in bytes; -1 if the server does not say.
  tag: the store's own name of this content, or when a local file was changed; "" if there is none.
  """

  size: int
  tag: str = ""

  def __str__(self):
    return f"{self.size:,} bytes" + f" ({self.tag})" * bool(self.tag)

  def differs(self, other: "Version") -> bool:
    """Whether something that both say is not the same."""
    sizes, tags = {self.size, other.size} - {-1}, {self.tag, other.tag} - {""}
    return len(sizes) > 1 or len(tags) > 1


class Versions:
  """Of the shards that the streams of a process have opened, as each was at first."""

  def __init__(self):
    self._first: dict[str, Version] = {}

  def check(self, shard: str, version: Version, size: int) -> None:
    """
    Args:
      version: that the shard has now.
      size: that it had when the run was saved; 0: not known. Only this counts across a resume, for
        a copy of the shard elsewhere has another tag.

    Raises:
      RunError: the shard is another.
    """
    for before in (Version(size or -1), self._first.setdefault(shard, version)):
      if version.differs(before):
        raise RunError(
          f"{shard} has changed under this run: it has {version} now, and had {before}. Bring it"
          " back, or begin a run of its own in a new --workdir."
        )

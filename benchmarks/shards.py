"""Writes members of tar shards."""

import io
import tarfile


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
  member = tarfile.TarInfo(name)
  member.size = len(content)
  tar.addfile(member, io.BytesIO(content))

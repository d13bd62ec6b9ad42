"""What `unlatch compare study.toml` does: `conduct` decides which runs are missing, `jobs` has them done, here or by
several processes at once, `run` does one, `progress` shows how far it is. `config.study` reads the file, `io.results`
keeps what was found, `report.study` compares it, `report.study_page` shows it.
"""

from .conduct import Request, conduct

__all__ = ["Request", "conduct"]

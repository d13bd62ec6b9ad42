"""What `unlatch check` looks at: each check answers in plain words whether a promise holds for the user's own model."""

from .finding import Finding, Verdict

__all__ = ["Finding", "Verdict"]

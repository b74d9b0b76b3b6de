"""Every error torchhook raises on purpose.

TorchhookError
├── SelectionError (ValueError)     a query is malformed, or nothing in the model answers to it
├── SessionError (RuntimeError)     a session was used in a state that does not allow it
├── SilentError (RuntimeError)      what was asked for never came
├── TapError (RuntimeError)         a tap did what it must not, or its transform failed at a site
├── BudgetError (RuntimeError)      storing one more value would exceed ``max_bytes``
├── OverwrittenError (RuntimeError) a value kept by reference was overwritten before it was read
├── NonfiniteError (FloatingPointError) a model made NaN or Inf; the text tells where it began
├── StopTraining (RuntimeError)     a monitor was told to stop the training if something is broken, and it is
├── RunError (ValueError)           what should be a run on disk is none, or cannot be read
├── HarvestError (ValueError)       a store of activations is none, is broken, or is of another model or data
└── NotRecordedError (KeyError)     a value is read that was not recorded
"""

from __future__ import annotations


class TorchhookError(Exception):
    """Base of all errors of this library."""


class SelectionError(TorchhookError, ValueError):
    """A query is malformed, or nothing in the model answers to it."""


class SessionError(TorchhookError, RuntimeError):
    """A session was used in a state that does not allow it."""


class SilentError(TorchhookError, RuntimeError):
    """A place was tapped by its name, or a whole query, and nothing was ever seen there."""


class TapError(TorchhookError, RuntimeError):
    """A tap did what it must not, or its transform failed at a site."""


class BudgetError(TorchhookError, RuntimeError):
    """Storing one more value would exceed the budget in bytes."""


class OverwrittenError(TorchhookError, RuntimeError):
    """A value kept by reference was overwritten in place before it was read."""


class NonfiniteError(TorchhookError, FloatingPointError):
    """A model made NaN or Inf; the text tells where it began."""


class StopTraining(TorchhookError, RuntimeError):  # noqa: N818 (it is no error of the program)
    """A monitor was told to stop the training if something is broken, and it is."""


class RunError(TorchhookError, ValueError):
    """What should be a run on disk is none, is broken, or was written by a newer torchhook."""


class HarvestError(TorchhookError, ValueError):
    """A store of activations is none, is broken, cannot be written, or is of another model or other data."""


class NotRecordedError(TorchhookError, KeyError):
    """A value is read that was not recorded."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes

"""The errors that torchhook raises on purpose.

TorchhookError
├── SelectionError (ValueError, KeyError) a query is malformed, or matches nothing in the model
├── SessionError (RuntimeError)     a session was used in a state that does not allow it
├── SilentError (RuntimeError)      a site that was asked for saw nothing
├── TapError (RuntimeError)         a tap did something that it must not do, or its transform failed
├── BudgetError (RuntimeError)      storing one more value would exceed ``max_bytes``
├── OverwrittenError (RuntimeError) a value kept by reference was overwritten before it was read
├── NonfiniteError (FloatingPointError) a model produced NaN or Inf; the message says where it began
├── StopTraining (RuntimeError)     a monitor that was asked to stop a broken training has found one
├── RunError (ValueError)           a run on disk does not exist, is broken, or was written by a newer torchhook
├── FileError (ValueError)          a profile, a saved result or call, or a file of settings is broken, or not one
├── HarvestError (ValueError)       a store of activations is missing, broken, not writable, or of another model or data
└── NotRecordedError (KeyError)     a value was read that was not recorded
"""

from __future__ import annotations


class TorchhookError(Exception):
    """Base class of all errors of this library."""


class SelectionError(TorchhookError, ValueError, KeyError):
    """A query is malformed, or matches nothing in the model."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes


class SessionError(TorchhookError, RuntimeError):
    """A session was used in a state that does not allow it."""


class SilentError(TorchhookError, RuntimeError):
    """A site that was named by its path, or every site of a query, saw nothing."""


class TapError(TorchhookError, RuntimeError):
    """A tap did something that it must not do, or its transform failed."""


class BudgetError(TorchhookError, RuntimeError):
    """Storing one more value would exceed the budget in bytes."""


class OverwrittenError(TorchhookError, RuntimeError):
    """A value kept by reference was overwritten in place before it was read."""


class NonfiniteError(TorchhookError, FloatingPointError):
    """A model produced NaN or Inf; the message says where it began."""


class StopTraining(TorchhookError, RuntimeError):  # noqa: N818 (not an error of the program)
    """A monitor that was asked to stop a broken training has found one."""


class RunError(TorchhookError, ValueError):
    """A run on disk does not exist, is broken, or was written by a newer torchhook."""


class FileError(TorchhookError, ValueError):
    """A profile, a saved result, a saved call or a file of settings is broken, or is not one at all."""


class HarvestError(TorchhookError, ValueError):
    """A store of activations does not exist, is broken, cannot be written, or is of another model or other data."""


class NotRecordedError(TorchhookError, KeyError):
    """A value was read that was not recorded."""

    __str__ = Exception.__str__  # a KeyError shows its message in quotes

"""The picture of a method: each concept is asked in turn, so that a new file of a known form has one."""

from __future__ import annotations

from ctxext.errors import InvalidParameterError
from ctxext.laboratory.pictures.attention import attention_asked
from ctxext.laboratory.pictures.bias import bias_asked
from ctxext.laboratory.pictures.picture import Picture
from ctxext.laboratory.pictures.positions import positions_asked
from ctxext.laboratory.pictures.request import PictureRequest
from ctxext.laboratory.pictures.rotation import rotation_asked
from ctxext.laboratory.pictures.rows import rows_asked
from ctxext.laboratory.pictures.sentence import sentence_asked
from ctxext.methods import Method

CONCEPTS = (sentence_asked, attention_asked, rows_asked, bias_asked, positions_asked, rotation_asked)


def picture_of(method: Method | None, request: PictureRequest) -> Picture:
    """Compute the picture of a method, or of rotation as it is (None), by the first concept that it has.

    Raises:
        CheckpointError: a checkpoint that does not exist.
        IncompatibleError: the checkpoint has nothing that the method changes.
        InvalidParameterError: the request does not fit the method or the text.
    """
    if request.length is not None and request.text is None:
        raise InvalidParameterError(f"--length {request.length} is of the --text that is read; give one.")
    for concept in CONCEPTS:
        if (picture := concept(method, request)) is not None:
            return picture
    assert method is not None, "rotation as it is has a picture"
    raise InvalidParameterError(f"Method {method.name!r} is of no kind that has a picture.")

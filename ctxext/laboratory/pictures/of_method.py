"""The picture of a method: which kind it is follows from the method's own form, so that a new file has one."""

from __future__ import annotations

from dataclasses import replace

from ctxext.checkpoints.inspect import rope_of_checkpoint
from ctxext.errors import InvalidParameterError
from ctxext.laboratory.pictures.attention import AttentionPicture
from ctxext.laboratory.pictures.bias import BiasPicture
from ctxext.laboratory.pictures.buckets import BucketPicture
from ctxext.laboratory.pictures.picture import Picture
from ctxext.laboratory.pictures.positions import PositionsPicture
from ctxext.laboratory.pictures.request import SMALL, PictureRequest
from ctxext.laboratory.pictures.rotation import RotationPicture
from ctxext.laboratory.pictures.rows import RowsPicture
from ctxext.laboratory.pictures.sentence import SentencePicture, depends_on_text
from ctxext.methods import BiasMethod, BucketMethod, EncodingMethod, Method, RopeMethod, TableMethod
from ctxext.methods.pi import PI
from ctxext.methods.remap import RemapMethod
from ctxext.spec import LLAMA, RopeSpec

TOKENS = 16  # of a matrix whose cells hold their numbers


def picture_of(method: Method | None, request: PictureRequest) -> Picture:
    """Compute the picture of a method, or of rotation as it is (None), of the kind that its form asks for.

    Raises:
        CheckpointError: there is no such checkpoint.
        IncompatibleError: the checkpoint has nothing that the method changes.
        InvalidParameterError: what was asked for does not fit the method or the text.
    """
    if request.length is not None and request.text is None:
        raise InvalidParameterError(f"--length {request.length} is of the --text that is read; give one.")
    if isinstance(method, EncodingMethod) and depends_on_text(method, SMALL):
        return SentencePicture.of(method, request)
    if request.text is not None:
        return AttentionPicture.of(method, request)
    if isinstance(method, EncodingMethod):
        is_added = method.form == "added"
        return RowsPicture.of_added(method, request) if is_added else BiasPicture.of_encoding(method, request)
    if method is not None and request.positions == "table":
        return RowsPicture.of_table(method, request)
    if isinstance(method, BiasMethod) and (request.positions == "elsewhere" or not isinstance(method, RopeMethod)):
        return BiasPicture.of_slopes(method, request)
    if isinstance(method, RemapMethod):
        return PositionsPicture.of([method], rope_for(request, TOKENS))
    if method is None or isinstance(method, RopeMethod):
        return RotationPicture.of(method or PI(factor=1.0), rope_for(request, LLAMA.trained_length), request.model)
    if isinstance(method, TableMethod):
        return RowsPicture.of_table(method, request)
    if isinstance(method, BucketMethod):
        return BucketPicture.of(method, request)
    raise InvalidParameterError(f"Method {method.name!r} is of no kind that has a picture.")


def rope_for(request: PictureRequest, trained_length: int) -> RopeSpec:
    """Return the rotation of the checkpoint, or an example that was trained for so many tokens."""
    if request.checkpoint is None:
        return replace(LLAMA, trained_length=request.trained_length or trained_length)
    return rope_of_checkpoint(
        request.checkpoint, trained_length=request.trained_length, trust_remote_code=request.trust
    )

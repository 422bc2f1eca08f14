"""A PDF file of given pages."""

from __future__ import annotations


def pdf(*pages: str) -> bytes:
    """A file of pages, each with one line of Helvetica, or none."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    numbers = []
    for page in pages:
        drawn = f"BT /F 12 Tf 20 100 Td ({page}) Tj ET".encode() if page else b""
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(drawn), drawn))
        made = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Resources<</Font<</F 3 0 R>>>>/Contents %d 0 R>>"
        objects.append(made % len(objects))
        numbers.append(len(objects))
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    objects[1] = b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, len(pages))
    file, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(file))
        file += b"%d 0 obj%s endobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(places) + 1, table)
    return file + head + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(places) + 1, len(file))

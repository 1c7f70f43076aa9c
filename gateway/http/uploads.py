"""Forms with one file that goes on as it arrives, in no more memory than a piece of it takes."""

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Generic

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import invalid
from gateway.http.forms import MAX_FIELD_BYTES, MAX_FIELDS, in_time, no_form, read_fields, require_form
from gateway.validation import Model

FORM_BYTES = 2 * 1024 * 1024  # of a body beside its file
_MAX_NAME_CHARACTERS = 512


class Upload(Generic[Model]):
    """Its file may be before its fields: both are known when all pieces were read.

    Args:
        file: the field's name.
        max_bytes: of the file.

    Attributes:
        filename: the client's, without folders; None: no file has begun to arrive.
    """

    def __init__(self, http: Request, model: type[Model], file: str, max_bytes: int) -> None:
        self._http, self._model, self._file, self._max_bytes = http, model, file, max_bytes
        self.filename: str | None = None
        self._fields = list[tuple[str, str]]()
        self._pieces = list[bytes]()  # of the file, from the last piece of the body
        self._bytes = self._field_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._header = bytearray(), bytearray()
        self._name, self._value = "", bytearray()
        self._is_file = self._has_ended = False
        self._began = time.monotonic()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Reads the form and yields its file's bytes.

        Raises:
            ApiError: 400, no form, or naming the field at fault; 408, it takes longer than a request may; 413.
        """
        require_form(self._http)
        _, options = parse_options_header(self._http.headers["content-type"])
        try:
            parser = MultipartParser(options[b"boundary"], self._callbacks())  # pyright: ignore[reportArgumentType]
        except (KeyError, FormParserError):
            raise no_form("Missing boundary in multipart.") from None
        stream = self._http.stream()
        while (body := await self._next(stream)) is not None:
            try:
                parser.write(body)
            except FormParserError as error:
                raise no_form(str(error)[:200]) from None
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
        if not self._has_ended:
            raise no_form("it has no end")

    async def _next(self, stream: AsyncGenerator[bytes, None]) -> bytes | None:
        async with in_time(self._http, began=self._began):
            return await anext(stream, None)

    def read(self) -> Model:
        """The fields, after the pieces. Raises ApiError: 400 naming what is missing or at fault."""
        request = read_fields(self._http, self._model, self._fields)
        if self.filename is None:
            raise invalid(self._file, "required, but missing: send it as a file", "missing_required_parameter")
        if not self._bytes:
            raise invalid(self._file, "the file is empty")
        return request

    def _callbacks(self) -> Mapping[str, Any]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._take,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._headers, self._value, self._is_file = {}, bytearray(), False

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[bytes(name).lower()] = bytes(value)
        self._header = bytearray(), bytearray()

    def _begin_content(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if b"name" not in options:
            raise no_form('The Content-Disposition header field "name" must be provided.')
        self._name = options[b"name"].decode(errors="replace")
        if b"filename" not in options and self._name != self._file:
            if len(self._fields) >= MAX_FIELDS:
                raise no_form(f"Too many fields. Maximum number of fields is {MAX_FIELDS}.")
            return
        if self._name != self._file:
            raise invalid(self._name, "unknown parameter", "unknown_parameter")
        if self.filename is not None:
            raise invalid(self._file, "is in the form twice")
        name = options.get(b"filename", b"").decode(errors="replace").replace("\\", "/").rpartition("/")[2]
        if not name.strip() or not name.isprintable() or len(name) > _MAX_NAME_CHARACTERS:
            reason = f"must be a file with a name of at most {_MAX_NAME_CHARACTERS} printable characters"
            raise invalid(self._file, f"{reason}; curl sends one by -F {self._file}=@PATH")
        self._is_file, self.filename = True, name

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._bytes += end - start
            if self._bytes > self._max_bytes:
                error = invalid(self._file, f"is larger than the {self._max_bytes} bytes allowed", "file_too_large")
                error.status = 413
                raise error
            self._pieces.append(data[start:end])
            return
        self._field_bytes += end - start
        if self._field_bytes > MAX_FIELD_BYTES:
            raise no_form(f"its fields are more than {MAX_FIELD_BYTES} bytes")
        self._value += data[start:end]

    def _end(self) -> None:
        if not self._is_file:
            self._fields.append((self._name, self._value.decode(errors="replace")))

    def _finish(self) -> None:
        self._has_ended = True

//! An answer that is read while the daemon produces it.

use std::fmt;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};

/// The events of disks as they occur. It is a recording, not JSON. Waits until the collection has
/// begun.
pub const RECORDING: Endpoint<Blocking, (), RecordingQuery, (), Recording> = Endpoint::get(
    "/v1/recording",
    "the events of disks as they occur, in binary: [recording.md](recording.md). `disk` and \
     `stream` may be repeated",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&RECORDING];

/// The answer of [`RECORDING`], which is a stream of bytes.
#[derive(Clone, Copy, Debug)]
pub enum Recording {}

/// What is recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecordingQuery {
    /// The disks; all if there are none.
    pub disk: Vec<String>,
    /// The streams; `IOstream` alone if there are none.
    pub stream: Vec<String>,
    /// The interval at which the daemon states up to which time the recording is complete, in
    /// milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pulse_ms: Option<u64>,
}

impl Query for RecordingQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] =
        &[("disk", "NAME"), ("stream", "NAME"), ("pulse_ms", "T")];
}

/// The longest head of an answer, and the longest first line of a chunk, in bytes.
const HEAD_MAX: usize = 16 << 10;
const LINE_MAX: u64 = 256;

/// The body of an answer, read as it arrives. Dropping the stream closes the connection.
pub struct AnswerStream {
    input: BufReader<UnixStream>,
    chunked: bool,
    /// The number of bytes left in the chunk, or in the answer if it is not chunked.
    left: u64,
    begun: bool,
    ended: bool,
}

impl fmt::Debug for AnswerStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AnswerStream").field("ended", &self.ended).finish_non_exhaustive()
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl AnswerStream {
    /// Reads the head. Returns the status and the body.
    pub(crate) fn begin(stream: UnixStream) -> io::Result<(u16, Self)> {
        let mut input = BufReader::with_capacity(64 << 10, stream);
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let room = (HEAD_MAX - head.len()) as u64;
            if (&mut input).take(room).read_until(b'\n', &mut head)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut answer = httparse::Response::new(&mut headers);
        match answer.parse(&head) {
            Ok(httparse::Status::Complete(_)) => {}
            _ => return Err(invalid("the answer is not HTTP")),
        }
        let find = |name: &str| {
            let header = answer.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name));
            header.map(|header| header.value)
        };
        let chunked = find("transfer-encoding").is_some_and(|v| v.eq_ignore_ascii_case(b"chunked"));
        let length = find("content-length")
            .map(|value| std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()))
            .map(|length: Option<u64>| length.ok_or_else(|| invalid("a length is not a number")))
            .transpose()?;
        let left = if chunked { 0 } else { length.unwrap_or(u64::MAX) };
        let status = answer.code.unwrap_or(0);
        Ok((status, Self { input, chunked, left, begun: false, ended: left == 0 && !chunked }))
    }

    /// A handle to the connection: `shutdown` on it ends a waiting read.
    ///
    /// # Errors
    /// When the process has no free descriptor.
    pub fn connection(&self) -> io::Result<UnixStream> {
        self.input.get_ref().try_clone()
    }

    fn line(&mut self) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        (&mut self.input).take(LINE_MAX).read_until(b'\n', &mut line)?;
        match line.strip_suffix(b"\r\n") {
            Some(line) => Ok(line.to_vec()),
            None if line.len() as u64 == LINE_MAX => Err(invalid("a chunk has no length")),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn next_chunk(&mut self) -> io::Result<()> {
        if self.begun && !self.line()?.is_empty() {
            return Err(invalid("a chunk is longer than its length"));
        }
        self.begun = true;
        let line = self.line()?;
        let digits = line.split(|&byte| byte == b';').next().unwrap_or_default();
        let digits = std::str::from_utf8(digits).unwrap_or_default().trim();
        self.left =
            u64::from_str_radix(digits, 16).map_err(|_| invalid("a chunk has no length"))?;
        if self.left == 0 {
            while !self.line()?.is_empty() {}
            self.ended = true;
        }
        Ok(())
    }
}

impl Read for AnswerStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.chunked && self.left == 0 && !self.ended {
            self.next_chunk()?;
        }
        if self.ended || buffer.is_empty() {
            return Ok(0);
        }
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.input.read(&mut buffer[..most])?;
        if read == 0 {
            self.ended = true;
            let open = !self.chunked && self.left > u64::MAX / 2;
            return if open { Ok(0) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        self.left -= read as u64;
        self.ended = self.left == 0 && !self.chunked;
        Ok(read)
    }
}

impl Client {
    /// The events of some disks, or of all disks if `disks` is empty, as they occur: a recording in
    /// the format of `docs/recording.md`. It has the named `streams`, or `IOstream` alone if there
    /// are no names. With `pulse`, the daemon states at this interval up to which time the
    /// recording is complete.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn recording(
        &self,
        disks: &[String],
        streams: &[&str],
        pulse: Option<Duration>,
    ) -> Result<AnswerStream, ClientError> {
        let pulse_ms = pulse.map(|pulse| pulse.as_millis().clamp(1, 60_000) as u64);
        let stream = streams.iter().map(|&name| name.to_owned()).collect();
        self.stream(&RECORDING, &(), &RecordingQuery { disk: disks.to_vec(), stream, pulse_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read_answer(answer: &[u8]) -> io::Result<(u16, Vec<u8>)> {
        let (ours, mut theirs) = UnixStream::pair()?;
        theirs.write_all(answer)?;
        drop(theirs);
        let (status, mut body) = AnswerStream::begin(ours)?;
        let mut bytes = Vec::new();
        body.read_to_end(&mut bytes)?;
        Ok((status, bytes))
    }

    #[test]
    fn chunks_are_joined_and_truncated_answers_reported() {
        let whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                      3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n";
        assert_eq!(read_answer(whole).unwrap(), (200, b"abc0123456789".to_vec()));
        for end in 0..whole.len() {
            assert!(read_answer(&whole[..end]).is_err(), "{end}");
        }
        let open = b"HTTP/1.1 404 No\r\n\r\nrest";
        assert_eq!(read_answer(open).unwrap(), (404, b"rest".to_vec()));
        let short = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nrest";
        assert!(read_answer(short).is_err());
        assert_eq!(read_answer(&[&short[..], b"more"].concat()).unwrap().1, b"restm");
        for bad in ["x", "-1", "", "11111111111111111"] {
            let text =
                format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{bad}\r\nabc\r\n");
            assert!(read_answer(text.as_bytes()).is_err(), "{bad}");
        }
    }
}

//! The part of HTTP/1.1 that a client needs to send one request on one connection.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// The longest answer that is read, in bytes.
const ANSWER_MAX: u64 = 256 << 20;
const HEADERS_MAX: usize = 32;

/// Sends one request and reads the answer. Returns its status and its body.
pub(crate) fn exchange(
    stream: &mut (impl Read + Write),
    method: &str,
    path: &str,
    body: Option<&[u8]>,
) -> io::Result<(u16, Vec<u8>)> {
    request(stream, method, path, body)?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
    parse(&answer)
}

/// Sends one request and reads an answer of at most so many bytes, up to an instant.
pub(crate) fn exchange_bounded(
    stream: &mut UnixStream,
    method: &str,
    path: &str,
    body: Option<&[u8]>,
    (bytes_max, end): (u64, Instant),
) -> io::Result<(u16, Vec<u8>)> {
    request(stream, method, path, body)?;
    let mut answer = Vec::new();
    let mut part = [0; 4096];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => return parse(&answer),
            Ok(length) if (answer.len() + length) as u64 <= bytes_max => {
                answer.extend_from_slice(&part[..length]);
            }
            Ok(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too long")),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sends one request.
pub(crate) fn request(
    stream: &mut impl Write,
    method: &str,
    path: &str,
    body: Option<&[u8]>,
) -> io::Result<()> {
    let mut request =
        format!("{method} {path} HTTP/1.1\r\nHost: fathom\r\nConnection: close\r\n").into_bytes();
    if let Some(body) = body {
        let header =
            format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        request.extend_from_slice(header.as_bytes());
    }
    request.extend_from_slice(b"\r\n");
    request.extend_from_slice(body.unwrap_or_default());
    stream.write_all(&request)
}

fn parse(answer: &[u8]) -> io::Result<(u16, Vec<u8>)> {
    let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Response::new(&mut headers);
    let start = match head.parse(answer) {
        Ok(httparse::Status::Complete(start)) => start,
        Ok(httparse::Status::Partial) => return Err(io::ErrorKind::UnexpectedEof.into()),
        Err(error) => return Err(invalid(format!("the answer is not HTTP: {error}"))),
    };
    let status = head.code.unwrap_or(0);
    let find = |name: &str| head.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name));
    let body = &answer[start..];
    if find("transfer-encoding").is_some() {
        return Err(invalid("the answer is chunked, which no Fathom daemon sends".into()));
    }
    let Some(header) = find("content-length") else { return Ok((status, body.to_vec())) };
    let length = std::str::from_utf8(header.value).ok().and_then(|text| text.parse().ok());
    match length {
        Some(length) if length <= body.len() => Ok((status, body[..length].to_vec())),
        Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        None => Err(invalid("the length of the answer is not a number".into())),
    }
}

/// Percent-encodes `text` as one part of a path or query.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                escaped.push(char::from(byte));
            }
            _ => {
                let _ = write!(escaped, "%{byte:02X}");
            }
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_by_length_or_to_the_end_and_truncated_ones_refused() {
        let full = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
        assert_eq!(parse(full).unwrap(), (200, b"hi".to_vec()));
        let open = b"HTTP/1.1 404 Not Found\r\n\r\nrest";
        assert_eq!(parse(open).unwrap(), (404, b"rest".to_vec()));
        for end in 0..full.len() {
            assert!(parse(&full[..end]).is_err(), "{end}");
        }
        assert!(parse(b"rubbish\r\n\r\n").is_err());
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(escape("a b/ä"), "a%20b%2F%C3%A4");
    }
}

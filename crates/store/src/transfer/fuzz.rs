//! Streams of arbitrary bytes.

use super::TransferError;
use super::format::{PAYLOAD_MAX, RecordReader, StreamRecord, seal};

/// Reads `data` as a stream, and as records with right checks. Panics if the reader breaks a
/// promise.
pub(crate) fn fuzz_stream(data: &[u8]) {
    read(data);
    let mut records = Vec::new();
    let mut left = data;
    while let [kind, length, rest @ ..] = left {
        let length = usize::from(*length).min(rest.len());
        records.push((kind % 6, &rest[..length]));
        left = &rest[length..];
    }
    read(&seal(&records));
}

fn read(bytes: &[u8]) {
    let Ok(mut reader) = RecordReader::new(bytes) else { return };
    let (mut at, mut size) = (0, 0);
    loop {
        let (first, length) = match reader.next() {
            Ok(StreamRecord::Begin(beginning)) => {
                size = beginning.size;
                continue;
            }
            Ok(StreamRecord::Data(first, bytes)) => {
                assert!(bytes.len() <= PAYLOAD_MAX);
                (first, bytes.len() as u64)
            }
            Ok(StreamRecord::Hole(first, length)) => (first, length),
            Err(TransferError::Stream(error)) => panic!("memory can be read: {error}"),
            Ok(StreamRecord::End(_)) | Err(_) => return,
        };
        assert!(first >= at && length > 0 && first + length <= size, "a record in its place");
        at = first + length;
    }
}

//! Entry point for fuzzing: any bytes of QEMU, of the guest agent, and in a record.

use super::record;
use crate::process::line::{LINE_MAX, Lines, Message};

/// Reads the bytes of a fuzzer as a record and as lines that arrive in pieces. The first byte is
/// the size of the pieces. The lines must be the same as if the bytes arrived at once.
pub fn fuzz_flush(data: &[u8]) {
    if let Ok(record) = record::parse(data) {
        let text = serde_json::to_vec(&record).unwrap_or_default();
        assert!(record::parse(&text).is_ok_and(|again| again == record), "{record:?}");
    }
    let Some((piece, data)) = data.split_first() else { return };
    let mut found = Vec::new();
    let mut lines = Lines::default();
    'pieces: for piece in data.chunks(usize::from(*piece).max(1)) {
        lines.add(piece);
        loop {
            match lines.next() {
                Ok(Some(line)) => found.push(line),
                Ok(None) => break,
                Err(_) => break 'pieces,
            }
        }
    }
    let expected = data.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n"));
    assert!(found.iter().map(Vec::as_slice).eq(expected.take(found.len())));
    for line in &found {
        assert!(line.len() <= LINE_MAX);
        if let Some(Message::Error(text)) = Message::read(line) {
            assert!(!text.contains(char::is_control));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    const PIECES: &[&str] = &[
        "{\"return\": {}}\n",
        "{\"return\": {\"exited\": true, \"exitcode\": 0}}\r\n",
        "{\"error\": {\"desc\": \"no\\u001b[2J\\n\"}}\n",
        "{\"QMP\": {}}\n",
        "{\"event\": \"RESUME\"}",
        "{\"version\": 1, \"vm\": \"x\", \"dirty_expire\": 3000}",
        "{\"version\": 1, \"vm\": \"x\", \"memory_bytes\": 18446744073709551615}",
        "\"memory_bytes\"",
        "[[[[[[[[",
        "{",
        "}",
        ":",
        "\n",
        "\u{0}\u{7f}",
        "1e999",
    ];

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: proptest::test_runner::RngSeed::Fixed(7),
            failure_persistence: None,
            ..ProptestConfig::with_cases(2000)
        })]

        #[test]
        fn any_bytes_are_read_or_rejected(
            choice in proptest::collection::vec(0..PIECES.len(), 0..12),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
            piece in any::<u8>(),
            is_record in any::<bool>(),
        ) {
            let mut data = if is_record { Vec::new() } else { vec![piece] };
            data.extend(choice.into_iter().flat_map(|index| PIECES[index].bytes()));
            for (at, value) in changes {
                if !data.is_empty() {
                    let at = at.index(data.len());
                    data[at] = value;
                }
            }
            super::fuzz_flush(&data);
        }
    }

    #[test]
    fn a_line_without_an_end_is_rejected() {
        for piece in [1, 255] {
            let mut data = vec![piece];
            data.extend_from_slice("x".repeat(70_000).as_bytes());
            data.extend_from_slice(b"\n{}\n");
            super::fuzz_flush(&data);
        }
    }
}

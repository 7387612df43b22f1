//! Images of devices as text: the lines that are not zero, and how often each follows itself.

use std::fmt::Write as _;

/// The bytes of a line.
const LINE: usize = 32;

/// The text of an image.
pub fn to_text(image: &[u8]) -> String {
    let mut text = format!("{}\n", image.len());
    let mut place = 0;
    for run in image.chunks(LINE).collect::<Vec<_>>().chunk_by(|one, next| one == next) {
        if run[0].iter().any(|byte| *byte != 0) {
            let _ = write!(text, "{place:x} {} ", run.len());
            for byte in run[0] {
                let _ = write!(text, "{byte:02x}");
            }
            text.push('\n');
        }
        place += run.len() * LINE;
    }
    text
}

/// The image of a text.
///
/// # Panics
/// If it is none.
pub fn from_text(text: &str) -> Vec<u8> {
    let mut lines = text.lines();
    let mut image = vec![0; lines.next().expect("a length").parse().expect("a length")];
    for line in lines {
        let fields: Vec<&str> = line.split(' ').collect();
        let place = usize::from_str_radix(fields[0], 16).expect("a place");
        let count: usize = fields[1].parse().expect("a count");
        let bytes: Vec<u8> = (0..fields[2].len() / 2)
            .map(|at| u8::from_str_radix(&fields[2][2 * at..][..2], 16).expect("digits"))
            .collect();
        for line in image[place..][..count * bytes.len()].chunks_mut(bytes.len()) {
            line.copy_from_slice(&bytes);
        }
    }
    image
}

//! Random inputs.

use super::Generator;
use crate::oracle::InputRow;
use crate::value::{Row, Value};

impl Generator {
    /// At most 60 rows. They have few distinct values, so that many are equal. Often several rows
    /// have the same instant, and sometimes there is a gap longer than most windows.
    pub fn inputs(&mut self) -> Vec<InputRow> {
        let count =
            if self.chance(15) { self.below(4) } else { self.below(61).min(self.below(80)) };
        let keys = 1 + self.below(4);
        let cancel = self.chance(40);
        let bursts = 20 + self.below(70);
        let mut time = self.below(20) as i64;
        let mut inputs: Vec<InputRow> = Vec::new();
        for _ in 0..count {
            if !self.chance(bursts) {
                time += match self.below(10) {
                    0..=5 => 1 + self.below(3),
                    6..=8 => 3 + self.below(6),
                    _ => 10 + self.below(20),
                } as i64;
            }
            let repeats = self.chance(15);
            let last = inputs.last().cloned().filter(|_| repeats);
            let (source, row) = last.map_or_else(
                || {
                    let source = self.below(2);
                    (source, self.row(source, keys, cancel))
                },
                |last| (last.source, last.row),
            );
            inputs.push(InputRow { source, time_ns: time, row, count: 1 });
        }
        inputs
    }

    /// A row. With `cancel` its float is one of [`cancelling`](Self::cancelling).
    fn row(&mut self, source: usize, keys: usize, cancel: bool) -> Row {
        let mut row = vec![Value::Integer(self.below(keys) as i64)];
        row.push(Value::Integer(self.below(5) as i64 - 1));
        if source == 0 {
            let float = if cancel { self.cancelling() } else { self.quarters() };
            row.push(Value::Float(float));
        }
        row.push(Value::text(self.one_of(&["", "a", "b", "ab", "A_"])));
        for value in &mut row {
            if self.chance(8) {
                *value = Value::Null;
            }
        }
        row
    }

    /// A float of such a size that a rounded sum with others loses digits, or one that is not
    /// finite.
    fn cancelling(&mut self) -> f64 {
        let extremes = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, f64::MAX, f64::MIN];
        if self.chance(10) {
            return self.one_of(&extremes);
        }
        self.one_of(&[1e17, -1e17, 1e300, -1e300, 5e-324, 0.1, 0.3, 5.0, 7.0, 12.5])
    }

    /// A small multiple of a quarter.
    pub(super) fn quarters(&mut self) -> f64 {
        (self.below(9) as f64 - 4.0) / 4.0
    }
}

//! Random inputs.

use super::Generator;
use crate::oracle::Input;
use crate::value::{Row, Value};

impl Generator {
    /// At most 60 rows: few different values, so that many are equal; often several of an
    /// instant, and now and then none for longer than windows last.
    pub fn inputs(&mut self) -> Vec<Input> {
        let count =
            if self.chance(15) { self.below(4) } else { self.below(61).min(self.below(80)) };
        let keys = 1 + self.below(4);
        let bursts = 20 + self.below(70);
        let mut time = self.below(20) as i64;
        let mut inputs: Vec<Input> = Vec::new();
        for _ in 0..count {
            if !self.chance(bursts) {
                time += match self.below(10) {
                    0..=5 => 1 + self.below(3),
                    6..=8 => 3 + self.below(6),
                    _ => 10 + self.below(20),
                } as i64;
            }
            let again = self.chance(15);
            let last = inputs.last().cloned().filter(|_| again);
            let (source, row) = last.map_or_else(
                || {
                    let source = self.below(2);
                    (source, self.row(source, keys))
                },
                |last| (last.source, last.row),
            );
            inputs.push(Input { source, time_ns: time, row, count: 1 });
        }
        inputs
    }

    fn row(&mut self, source: usize, keys: usize) -> Row {
        let mut row = vec![Value::Integer(self.below(keys) as i64)];
        row.push(Value::Integer(self.below(5) as i64 - 1));
        if source == 0 {
            row.push(Value::Float(self.quarters()));
        }
        row.push(Value::text(self.one_of(&["", "a", "b", "ab", "A_"])));
        for value in &mut row {
            if self.chance(8) {
                *value = Value::Null;
            }
        }
        row
    }

    /// A small multiple of a quarter.
    pub(super) fn quarters(&mut self) -> f64 {
        (self.below(9) as f64 - 4.0) / 4.0
    }
}

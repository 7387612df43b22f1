//! Counts of numbers in buckets.
//!
//! The buckets depend on the aggregate alone, not on the values. So numbers can be removed, the
//! histograms of parts add up, and the number of buckets is bounded. Each bucket has a place, a
//! number in the order of the bounds. A bucket reaches from its bound, inclusive, to the bound of
//! the next bucket.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::value::Value;

/// The number of a bucket. Bucket 0 begins at 0.
pub type BucketNumber = i16;

/// The smallest power of two that is a bound has the negative of this exponent.
const NEGATIVE_EXPONENT_MAX: i16 = 20;
/// The exponent of the greatest power of two that is a bound.
const EXPONENT_MAX: i16 = 63;
/// The number of buckets of a width on each side of 0.
const LINEAR_MAX: BucketNumber = 1024;

/// A division of the numbers into buckets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Buckets {
    /// By powers of two: 0, the powers from 2⁻²⁰ to 2⁶³, and their negatives.
    PowersOfTwo,
    /// For integers: by the multiples of a width from −1,024 to 1,024 times it.
    Integers(NonZeroU64),
    /// For floats: the same. A multiple is a product of floats, and so may be rounded.
    Floats(f64),
}

/// The lower bound of a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    /// Below all other bounds.
    Lowest,
    Whole(i128),
    Float(f64),
    /// Above all numbers: the bucket of NaN.
    Nan,
}

impl Bound {
    /// Whether a value is not below the bound.
    fn admits(self, value: &Value) -> bool {
        match (value, self) {
            (_, Self::Lowest) => true,
            (Value::Integer(integer), Self::Whole(bound)) => bound <= i128::from(*integer),
            // Only bounds between -1 and 1 are floats here.
            (Value::Integer(integer), Self::Float(bound)) => bound <= *integer as f64,
            (Value::Float(number), Self::Whole(bound)) => {
                number.is_nan() || bound as f64 <= *number
            }
            (Value::Float(number), Self::Float(bound)) => number.is_nan() || bound <= *number,
            (Value::Float(number), Self::Nan) => number.is_nan(),
            _ => false,
        }
    }
}

impl Buckets {
    /// The allowed widths.
    pub const WIDTHS: RangeInclusive<f64> = 1e-6..=1e15;

    /// The places of the first bucket, for all numbers below the bound of the second, and of the
    /// last, for NaN.
    fn places(self) -> (BucketNumber, BucketNumber) {
        match self {
            Self::PowersOfTwo => (
                -(NEGATIVE_EXPONENT_MAX + EXPONENT_MAX + 2),
                NEGATIVE_EXPONENT_MAX + EXPONENT_MAX + 2,
            ),
            Self::Integers(_) | Self::Floats(_) => (-LINEAR_MAX - 1, LINEAR_MAX + 1),
        }
    }

    fn bound(self, place: BucketNumber) -> Bound {
        let (first, last) = self.places();
        if place <= first {
            return Bound::Lowest;
        }
        if place >= last {
            return Bound::Nan;
        }
        match self {
            Self::PowersOfTwo => {
                let exponent = place.abs() - 1 - NEGATIVE_EXPONENT_MAX;
                match (place, exponent) {
                    (0, _) => Bound::Whole(0),
                    (_, 0..) => Bound::Whole((1 << exponent) * i128::from(place.signum())),
                    (_, _) => {
                        let power = 1.0 / f64::from(1 << -exponent);
                        Bound::Float(power.copysign(f64::from(place)))
                    }
                }
            }
            Self::Integers(width) => Bound::Whole(i128::from(place) * i128::from(width.get())),
            Self::Floats(width) => Bound::Float(f64::from(place) * width),
        }
    }

    /// The bucket of a number; `None` for another value. This search defines the buckets: it finds
    /// the last one that does not begin above the number. [`place`](Self::place) gives the same
    /// result faster.
    pub(super) fn search(self, value: &Value) -> Option<BucketNumber> {
        if !matches!(value, Value::Integer(_) | Value::Float(_)) {
            return None;
        }
        let (mut low, mut high) = self.places();
        while low < high {
            let middle = high - (high - low) / 2;
            if self.bound(middle).admits(value) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        Some(low)
    }

    /// The bucket of a number; `None` for another value.
    pub fn place(self, value: &Value) -> Option<BucketNumber> {
        match *value {
            Value::Integer(integer) => Some(self.place_of_integer(integer)),
            Value::Float(number) => Some(self.place_of_float(number)),
            Value::Null | Value::Boolean(_) | Value::Text(_) => None,
        }
    }

    /// The bucket of an integer.
    pub fn place_of_integer(self, integer: i64) -> BucketNumber {
        match self {
            Self::PowersOfTwo => {
                let size = integer.unsigned_abs();
                let Some(floor) = size.checked_ilog2() else { return 0 };
                let ceiling = floor + u32::from(!size.is_power_of_two());
                power_place(integer < 0, floor as i16, ceiling as i16)
            }
            Self::Integers(width) => {
                linear_place(i128::from(integer).div_euclid(i128::from(width.get())))
            }
            Self::Floats(_) => self.place_of_float(integer as f64),
        }
    }

    fn place_of_float(self, number: f64) -> BucketNumber {
        let (_, last) = self.places();
        if number.is_nan() {
            return last;
        }
        match self {
            Self::PowersOfTwo => {
                const FRACTION: u64 = (1 << 52) - 1;
                let bits = number.to_bits();
                let floor = ((bits >> 52 & 0x7ff) as i16) - 1023;
                let ceiling = floor + i16::from(bits & FRACTION != 0);
                if number == 0.0 { 0 } else { power_place(number < 0.0, floor, ceiling) }
            }
            Self::Integers(width) => linear_place((number / width.get() as f64).floor() as i128),
            Self::Floats(width) => {
                // The rounded quotient may be that of a neighbouring bucket.
                let near = linear_place((number / width).floor() as i128);
                let places = [near.saturating_add(1), near, near - 1];
                let value = Value::Float(number);
                let fits =
                    |place: &BucketNumber| *place < last && self.bound(*place).admits(&value);
                places.into_iter().find(fits).unwrap_or(-LINEAR_MAX - 1)
            }
        }
    }

    /// A histogram as a text: for each bucket that is not empty its bound, a colon and its count,
    /// separated by spaces. Null if there are no numbers.
    pub fn text(self, counts: impl IntoIterator<Item = (BucketNumber, i64)>) -> Value {
        join(counts, |place| self.label(place))
    }

    fn label(self, place: BucketNumber) -> String {
        match (self.bound(place), self) {
            (Bound::Lowest, _) => "-inf".to_owned(),
            (Bound::Whole(bound), _) => bound.to_string(),
            (Bound::Float(bound), Self::Floats(width)) => {
                // With the number of decimals of the width: 0.3, not 0.30000000000000004.
                let decimals =
                    width.to_string().split_once('.').map_or(0, |(_, digits)| digits.len());
                format!("{:.decimals$}", bound + 0.0)
            }
            (Bound::Float(bound), _) => bound.to_string(),
            (Bound::Nan, _) => "nan".to_owned(),
        }
    }

    /// The histogram of a part as a text, with the places of buckets instead of bounds.
    pub fn part(self, counts: impl IntoIterator<Item = (BucketNumber, i64)>) -> Value {
        join(counts, |place| place)
    }

    /// The counts of a text that [`part`](Self::part) made; `None` for any other text, which
    /// another host may send.
    pub fn from_part(self, text: &str) -> Option<Vec<(BucketNumber, i64)>> {
        let (first, last) = self.places();
        let count = |part: &str| {
            let (place, count) = part.split_once(':')?;
            let (place, count) = (place.parse().ok()?, count.parse().ok()?);
            ((first..=last).contains(&place) && count > 0).then_some((place, count))
        };
        let counts: Vec<(BucketNumber, i64)> = text.split(' ').map(count).collect::<Option<_>>()?;
        counts.windows(2).all(|two| two[0].0 < two[1].0).then_some(counts)
    }
}

/// The place of a number among the powers of two. `floor` and `ceiling` are the rounded binary
/// logarithms of its magnitude.
fn power_place(negative: bool, floor: i16, ceiling: i16) -> BucketNumber {
    if negative {
        -(ceiling.clamp(-NEGATIVE_EXPONENT_MAX, EXPONENT_MAX + 1) + NEGATIVE_EXPONENT_MAX + 1)
    } else if floor < -NEGATIVE_EXPONENT_MAX {
        0
    } else {
        floor.min(EXPONENT_MAX) + NEGATIVE_EXPONENT_MAX + 1
    }
}

fn linear_place(multiple: i128) -> BucketNumber {
    multiple.clamp(i128::from(-LINEAR_MAX - 1), i128::from(LINEAR_MAX)) as BucketNumber
}

fn join<T: fmt::Display>(
    counts: impl IntoIterator<Item = (BucketNumber, i64)>,
    label: impl Fn(BucketNumber) -> T,
) -> Value {
    let counted = counts.into_iter().filter(|&(_, count)| count > 0);
    let parts: Vec<String> =
        counted.map(|(place, count)| format!("{}:{count}", label(place))).collect();
    if parts.is_empty() { Value::Null } else { Value::text(&parts.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Generator;

    fn integers(width: u64) -> Buckets {
        Buckets::Integers(NonZeroU64::new(width).unwrap())
    }

    /// The text of the histogram of one number.
    fn of(buckets: Buckets, value: &Value) -> String {
        let place = buckets.place(value).unwrap();
        assert_eq!(buckets.search(value), Some(place), "{value:?}");
        buckets.text([(place, 1)]).to_string()
    }

    #[test]
    fn powers_of_two() {
        for (integer, bound) in [
            (0, "0"),
            (1, "1"),
            (2, "2"),
            (3, "2"),
            (4, "4"),
            (-1, "-1"),
            (-2, "-2"),
            (-3, "-4"),
            (-4, "-4"),
            (-5, "-8"),
            (i64::MAX, "4611686018427387904"),
            (i64::MIN, "-9223372036854775808"),
            (i64::MIN + 1, "-9223372036854775808"),
        ] {
            let is = of(Buckets::PowersOfTwo, &Value::Integer(integer));
            assert_eq!(is, format!("{bound}:1"), "{integer}");
        }
        let least = "0.00000095367431640625";
        for (number, bound) in [
            (0.0, "0"),
            (-0.0, "0"),
            (5e-324, "0"),
            (9e-7, "0"),
            (9.6e-7, least),
            (-5e-324, &format!("-{least}")),
            (-1e-6, "-0.0000019073486328125"),
            (0.75, "0.5"),
            (-0.75, "-1"),
            (1.5, "1"),
            (-1.5, "-2"),
            (9e18, "4611686018427387904"),
            (1e19, "9223372036854775808"),
            (f64::INFINITY, "9223372036854775808"),
            (-9_223_372_036_854_775_808.0, "-9223372036854775808"),
            (-1e19, "-inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ] {
            let is = of(Buckets::PowersOfTwo, &Value::Float(number));
            assert_eq!(is, format!("{bound}:1"), "{number}");
        }
    }

    #[test]
    fn widths() {
        for (width, integer, bound) in [
            (10, 0, "0"),
            (10, 9, "0"),
            (10, 10, "10"),
            (10, -1, "-10"),
            (10, -10, "-10"),
            (10, -11, "-20"),
            (10, 10_239, "10230"),
            (10, 10_240, "10240"),
            (10, i64::MAX, "10240"),
            (10, -10_240, "-10240"),
            (10, -10_241, "-inf"),
            (1 << 62, i64::MIN, "-9223372036854775808"),
            (i64::MAX as u64, i64::MIN, "-18446744073709551614"),
        ] {
            let is = of(integers(width), &Value::Integer(integer));
            assert_eq!(is, format!("{bound}:1"), "{integer} by {width}");
        }
        for (width, number, bound) in [
            (0.1, 0.3, "0.2"),
            (0.1, 0.1 * 3.0, "0.3"),
            (0.1, -0.05, "-0.1"),
            (0.1, -0.0, "0.0"),
            (2.0, 5.0, "4"),
            (0.25, 0.5, "0.50"),
            (0.25, 1e300, "256.00"),
            (0.25, f64::INFINITY, "256.00"),
            (0.25, f64::NEG_INFINITY, "-inf"),
            (0.25, f64::NAN, "nan"),
        ] {
            let is = of(Buckets::Floats(width), &Value::Float(number));
            assert_eq!(is, format!("{bound}:1"), "{number} by {width}");
        }
        assert_eq!(integers(1).place(&Value::text("1")), None);
        assert_eq!(integers(1).search(&Value::Null), None);
    }

    #[test]
    fn places_are_those_of_the_search() {
        let mut generator = Generator::new(5);
        let kinds = [Buckets::PowersOfTwo, integers(1), integers(7), integers(u64::MAX)];
        let floats = [0.1, 0.3, 1e-6, 2.5, 1e300, f64::MAX].map(Buckets::Floats);
        for _ in 0..200_000 {
            let bits = generator.below(64);
            let number = generator.number() as i64 >> bits;
            let integer = Value::Integer(number);
            for buckets in kinds {
                assert_eq!(buckets.place(&integer), buckets.search(&integer), "{number}");
            }
            let exact = f64::from_bits(generator.number());
            let many = [0.1, 0.3, 1e-6, 2.5][generator.below(4)] * (number % 1030) as f64;
            for float in [exact, many, number as f64] {
                let value = Value::Float(float);
                for buckets in floats.into_iter().chain([Buckets::PowersOfTwo]) {
                    assert_eq!(
                        buckets.place(&value),
                        buckets.search(&value),
                        "{float:?} {buckets:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn parts_are_restored_from_texts() {
        let buckets = Buckets::PowersOfTwo;
        let counts = vec![(-85, 3), (0, 1), (7, i64::MAX), (85, 9)];
        let part = buckets.part(counts.clone());
        assert_eq!(part, Value::text("-85:3 0:1 7:9223372036854775807 85:9"));
        assert_eq!(buckets.from_part(&part.to_string()), Some(counts));
        for wrong in [
            "",
            " ",
            "1",
            "1:0",
            "1:-4",
            "86:1",
            "2:1 1:1",
            "1:1 1:1",
            "a:1",
            "1:1  2:1",
            "1:9223372036854775808",
            "99999:1",
            "1:1:1",
        ] {
            assert_eq!(buckets.from_part(wrong), None, "{wrong}");
        }
        assert_eq!(buckets.text([(1, 0), (2, -1)]), Value::Null);
    }
}

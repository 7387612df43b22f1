//! Exact sums of floats, from which values can be removed.
//!
//! A float is an integer times a power of two, and so is a sum of floats. The sum is kept as an
//! integer in digits of 32 bits, times a power of two. A digit is kept in 64 bits with a sign, so
//! that many additions need no carry. Only the result is rounded. So it depends neither on the
//! order of the values nor on values that were removed.
//!
//! Values of similar size need three or four digits. A sum never needs more than 68 digits, and a
//! sum of squares never more than 136.

/// The bits of a digit.
const BITS: i32 = 32;
/// The base of the digits.
const BASE: i64 = 1 << BITS;
/// The most additions without a carry. An addition changes a digit by less than 2³⁴, so no digit
/// overflows.
const ADDITIONS_MAX: u32 = 1 << 28;
/// The bits of a part of a factor. The square of a float's integer has 106 bits, so a product with
/// a part fits 127 bits.
const FACTOR_BITS: i32 = 20;

/// A sum of integers times powers of two.
#[derive(Clone, Debug, Default)]
struct Total {
    /// The exponent of the first digit, in units of 32: that digit counts 2 to the power of 32 ·
    /// `first`.
    first: i32,
    /// The digits, lowest first.
    digits: Vec<i64>,
    /// The number of additions since the last carry.
    additions: u32,
}

impl Total {
    /// Adds or subtracts `integer` · 2 to the power of `exponent`. The integer is less than 2¹²⁷.
    fn add(&mut self, mut integer: u128, exponent: i32, is_negative: bool) {
        if integer == 0 {
            return;
        }
        let (place, shift) = (exponent.div_euclid(BITS), exponent.rem_euclid(BITS));
        let bits = shift + (u128::BITS - integer.leading_zeros()) as i32;
        let mut at = self.place(place, (bits + BITS - 1) / BITS + 1);
        let sign = if is_negative { -1 } else { 1 };
        while integer > 0 {
            let part = ((integer as u64) & (BASE as u64 - 1)) << shift;
            self.digits[at] += sign * (part & (BASE as u64 - 1)) as i64;
            self.digits[at + 1] += sign * (part >> BITS) as i64;
            integer >>= BITS;
            at += 1;
        }
        self.additions += 1;
        if self.additions >= ADDITIONS_MAX {
            self.carry();
        }
    }

    /// Adds or subtracts the same number `times` times.
    fn add_times(&mut self, integer: u128, exponent: i32, is_negative: bool, times: i64) {
        let is_negative = is_negative != (times < 0);
        let mut times = times.unsigned_abs();
        let mut exponent = exponent;
        while times > 0 {
            let part = times & ((1 << FACTOR_BITS) - 1);
            self.add(integer * u128::from(part), exponent, is_negative);
            times >>= FACTOR_BITS;
            exponent += FACTOR_BITS;
        }
    }

    /// The index of the digit at `place`. Adds missing digits, so that there are `count` digits
    /// from it on.
    fn place(&mut self, place: i32, count: i32) -> usize {
        if self.digits.is_empty() {
            self.first = place;
        }
        if place < self.first {
            let missing = (self.first - place) as usize;
            self.digits.splice(0..0, std::iter::repeat_n(0, missing));
            self.first = place;
        }
        let at = (place - self.first) as usize;
        let end = at + count as usize;
        if self.digits.len() < end {
            self.digits.resize(end, 0);
        }
        at
    }

    /// Carries, so that each digit but the last is from 0 to 2³² − 1. The last has the sign. It is
    /// never 0, and −1 only if it is the only digit. Zero has no digits.
    fn carry(&mut self) {
        self.additions = 0;
        let mut carried = 0;
        for digit in &mut self.digits {
            *digit += carried;
            carried = digit.div_euclid(BASE);
            *digit = digit.rem_euclid(BASE);
        }
        if carried != 0 {
            self.digits.push(carried);
        }
        while self.digits.last() == Some(&0) {
            self.digits.pop();
        }
        while let [.., below, -1] = &mut self.digits[..] {
            *below -= BASE;
            self.digits.pop();
        }
        // Zero digits at the low end are removed.
        let zeros = self.digits.iter().take_while(|digit| **digit == 0).count();
        if zeros > 4 {
            self.digits.drain(..zeros);
            self.first += zeros as i32;
        }
    }

    /// The number as a float times a power of two, rounded once.
    fn rounded(&mut self) -> (f64, i32) {
        self.carry();
        let count = self.digits.len();
        if count == 0 {
            return (0.0, 0);
        }
        // The three upper digits have more bits than a float. The lower digits only decide a tie,
        // so one bit for all of them is enough.
        let digit = |below: usize| count.checked_sub(below).map_or(0, |at| self.digits[at]);
        let upper = (1..=3).fold(0, |all, below| all * i128::from(BASE) + i128::from(digit(below)));
        let lower = self.digits.iter().take(count.saturating_sub(3)).any(|digit| *digit != 0);
        let integer = upper * 2 + i128::from(lower);
        (integer as f64, (self.first + count as i32 - 3) * BITS - 1)
    }

    /// The sum of the products of all pairs of digits.
    fn square(&mut self) -> Self {
        self.carry();
        let mut square = Self::default();
        let count = self.digits.len();
        for place in 0..(2 * count).saturating_sub(1) {
            let first = place.saturating_sub(count - 1);
            let products = (first..=place - first)
                .map(|at| i128::from(self.digits[at]) * i128::from(self.digits[place - at]));
            let sum: i128 = products.sum();
            let exponent = (2 * self.first + place as i32) * BITS;
            square.add(sum.unsigned_abs(), exponent, sum < 0);
        }
        square
    }

    /// Subtracts another sum.
    fn subtract(&mut self, other: &Self) {
        for (place, digit) in (other.first..).zip(&other.digits) {
            self.add(digit.unsigned_abs().into(), place * BITS, *digit > 0);
        }
    }

    /// The sum times `factor`.
    fn times(&mut self, factor: i64) -> Self {
        self.carry();
        let mut product = Self::default();
        for (place, digit) in (self.first..).zip(&self.digits) {
            let integer = u128::from(digit.unsigned_abs());
            product.add_times(integer, place * BITS, *digit < 0, factor);
        }
        product
    }
}

/// A float times a power of two.
fn scaled(number: f64, exponent: i32) -> f64 {
    let (mut number, mut exponent) = (number, exponent);
    while exponent > 1000 {
        number *= f64::from_bits(2023 << 52);
        exponent -= 1000;
    }
    while exponent < -1000 {
        number *= f64::from_bits(23 << 52);
        exponent += 1000;
    }
    number * f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// `integer` · 2 to the power of `exponent`, rounded to the nearest float once, also if the float
/// is subnormal.
fn nearest(integer: u128, exponent: i32) -> f64 {
    let bits = (u128::BITS - integer.leading_zeros()) as i32;
    // A subnormal float has fewer bits, because none counts less than 2⁻¹⁰⁷⁴.
    let kept = (exponent + bits + 1074).min(53);
    let dropped = bits - kept;
    if dropped <= 0 {
        return scaled(integer as f64, exponent);
    }
    if kept < 0 {
        return 0.0;
    }
    let (upper, half) = (integer.checked_shr(dropped as u32).unwrap_or(0), 1 << (dropped - 1));
    let lower = integer & (half | (half - 1));
    let is_up = lower > half || (lower == half && upper & 1 == 1);
    scaled((upper + u128::from(is_up)) as f64, exponent + dropped)
}

/// `number` · 2 to the power of `exponent`, divided by a positive `divisor`. Only the quotient is
/// rounded, once.
fn quotient(number: f64, exponent: i32, divisor: f64) -> f64 {
    /// With so many more bits the quotient has at least 72, and at most 126.
    const MORE: i32 = 73;
    let ((dividend, up), (divisor, down)) = (parts(number), parts(divisor));
    let dividend = u128::from(dividend) << MORE;
    let (whole, rest) = (dividend / u128::from(divisor), dividend % u128::from(divisor));
    // The rest only decides a tie, so one bit is enough for it.
    let integer = whole * 2 + u128::from(rest != 0);
    nearest(integer, up - down + exponent - MORE - 1).copysign(number)
}

/// The integer and the exponent of a finite float, without its sign.
fn parts(number: f64) -> (u64, i32) {
    let bits = number.to_bits();
    let fraction = bits & ((1 << 52) - 1);
    match (bits >> 52 & 0x7ff) as i32 {
        0 => (fraction, -1074),
        exponent => (fraction | 1 << 52, exponent - 1075),
    }
}

/// Exact sums of floats and, optionally, of their squares.
///
/// Infinities and NaNs are counted instead of added, so that they can be removed.
#[derive(Clone, Debug, Default)]
pub struct FloatSums {
    sum: Total,
    squares: Option<Total>,
    infinite: i64,
    negative_infinite: i64,
    nans: i64,
}

impl FloatSums {
    /// Sums of no values. `squares` is whether the sums need to have a
    /// [`variance`](Self::variance).
    pub fn new(squares: bool) -> Self {
        Self { squares: squares.then(Total::default), ..Self::default() }
    }

    /// Adds a number `count` times; a negative count removes it.
    pub fn add(&mut self, number: f64, count: i64) {
        if number.is_finite() {
            let (integer, exponent) = parts(number);
            let integer = u128::from(integer);
            let is_negative = number.is_sign_negative();
            match count {
                1 | -1 => self.sum.add(integer, exponent, is_negative != (count < 0)),
                _ => self.sum.add_times(integer, exponent, is_negative, count),
            }
            if let Some(squares) = &mut self.squares {
                squares.add_times(integer * integer, 2 * exponent, false, count);
            }
        } else if number.is_nan() {
            self.nans += count;
        } else if number > 0.0 {
            self.infinite += count;
        } else {
            self.negative_infinite += count;
        }
    }

    /// The sum, if values that are not finite determine it.
    fn not_finite(&self) -> Option<f64> {
        let counts = [self.nans, self.infinite, self.negative_infinite];
        match counts.map(|count| count > 0) {
            [false, false, false] => None,
            [false, true, false] => Some(f64::INFINITY),
            [false, false, true] => Some(f64::NEG_INFINITY),
            _ => Some(f64::NAN),
        }
    }

    /// The sum, rounded to the nearest float.
    pub fn sum(&mut self) -> f64 {
        self.not_finite().unwrap_or_else(|| {
            let (number, exponent) = self.sum.rounded();
            scaled(number, exponent)
        })
    }

    /// The exact sum, rounded to a float, divided by the count; the quotient is rounded once.
    pub fn average(&mut self, count: i64) -> f64 {
        self.not_finite().unwrap_or_else(|| {
            let (number, exponent) = self.sum.rounded();
            quotient(number, exponent, count as f64)
        })
    }

    /// The variance: `(count · squares − sum²) / count²`, where numerator and denominator are exact
    /// and each is rounded to a float once, as is the quotient. NaN if a value is not finite, or
    /// without squares.
    pub fn variance(&mut self, count: i64) -> f64 {
        let Some(squares) = self.squares.as_mut().filter(|_| count > 0) else { return f64::NAN };
        let mut numerator = squares.times(count);
        numerator.subtract(&self.sum.square());
        if self.not_finite().is_some() {
            return f64::NAN;
        }
        let (number, exponent) = numerator.rounded();
        let denominator = i128::from(count) * i128::from(count);
        quotient(number.max(0.0), exponent, denominator as f64)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "the results are exact")]

    use super::*;
    use crate::generate::Generator;

    fn sums(numbers: &[f64]) -> FloatSums {
        let mut sums = FloatSums::new(true);
        for number in numbers {
            sums.add(*number, 1);
        }
        sums
    }

    #[test]
    fn removed_values_leave_no_error() {
        let mut sums = sums(&[1e17, 5.0, 7.0, 1e300, -1e-300, 1e-320]);
        for removed in [1e300, 1e17, -1e-300, 1e-320] {
            sums.add(removed, -1);
        }
        assert_eq!((sums.sum(), sums.average(2), sums.variance(2)), (12.0, 6.0, 1.0));
        sums.add(5.0, -1);
        assert_eq!((sums.sum(), sums.variance(1)), (7.0, 0.0));
        sums.add(7.0, -1);
        assert_eq!(sums.sum(), 0.0);
        assert!(sums.sum.digits.is_empty());
    }

    #[test]
    fn sums_are_the_nearest_floats() {
        for (numbers, expected) in [
            (&[0.1, 0.2, 0.3][..], 0.6),
            (&[1.0, 1e100, 1.0, -1e100], 2.0),
            (&[f64::MAX, f64::MAX, -f64::MAX], f64::MAX),
            (&[f64::MAX, f64::MAX], f64::INFINITY),
            (&[f64::MIN, f64::MIN], f64::NEG_INFINITY),
            (&[5e-324, 5e-324, -1e-323], 0.0),
            (&[5e-324, -1e-323], -5e-324),
            // Half of the last bit is rounded to even, unless lower digits are not 0.
            (&[9_007_199_254_740_992.0, 1.0], 9_007_199_254_740_992.0),
            (&[9_007_199_254_740_992.0, 1.0, 1e-300], 9_007_199_254_740_994.0),
            (&[-9_007_199_254_740_992.0, -1.0, -1e-300], -9_007_199_254_740_994.0),
            (&[-9_007_199_254_740_992.0, -1.0, 1e-300], -9_007_199_254_740_992.0),
        ] {
            assert_eq!(sums(numbers).sum().to_bits(), f64::to_bits(expected), "{numbers:?}");
        }
        assert_eq!(sums(&[f64::MAX, f64::MAX]).average(2), f64::MAX);
        assert_eq!(sums(&[1e200, -1e200]).variance(2), f64::INFINITY);
        let power = f64::from_bits((1023 + 500) << 52);
        assert_eq!(sums(&[power, -power]).variance(2), power * power);
    }

    /// The float that is this number of the least units of floats.
    fn least(units: u64) -> f64 {
        f64::from_bits(units)
    }

    #[test]
    fn subnormal_means_and_variances_are_rounded_once() {
        // The quotient is so near to a tie that it is one with 53 bits.
        let (count, half) = ((1_i64 << 29) + 1, (1_i64 << 23) + 1);
        for (whole, odd) in [(half, 1), (half, -1), (half - 1, 1), (half - 1, -1)] {
            let units = ((2 * whole + 1) * count + odd) / 2;
            let expected = least((whole + i64::from(odd > 0)) as u64);
            assert_eq!(sums(&[least(units as u64)]).average(count), expected, "{whole} {odd}");
            assert_eq!(sums(&[-least(units as u64)]).average(count), -expected, "{whole} {odd}");
        }
        // A variance of half a unit and a little is one unit, and of half a unit none.
        let mut generator = Generator::new(9);
        for _ in 0..2000 {
            let units = generator.number() >> (11 + generator.below(52));
            let count = 1 + (generator.number() >> (34 + generator.below(30))) as i64;
            let (whole, rest) = (units / count as u64, units % count as u64);
            let up = 2 * rest > count as u64 || (2 * rest == count as u64 && whole & 1 == 1);
            if whole < 1 << 52 {
                let expected = least(whole + u64::from(up));
                assert_eq!(sums(&[least(units)]).average(count), expected, "{units} / {count}");
            }
        }
        let variance = |power: u64, units: f64| {
            let step = f64::from_bits((1023 - power) << 52);
            sums(&[step * units, 0.0, 0.0]).variance(3)
        };
        // The variance of u, 0, 0 is 2 u² / 9: of 3 · 2⁻⁵³⁷ it is 2⁻¹⁰⁷³, two units.
        assert_eq!((variance(537, 3.0), variance(538, 3.0)), (least(2), 0.0));
        assert_eq!(variance(538, 3.000_000_000_000_000_5), least(1));
    }

    #[test]
    fn values_that_are_not_finite_can_be_removed() {
        let mut sums = sums(&[1.5, f64::INFINITY, f64::NEG_INFINITY]);
        assert!(sums.sum().is_nan() && sums.average(3).is_nan() && sums.variance(3).is_nan());
        sums.add(f64::NEG_INFINITY, -1);
        assert_eq!(sums.sum(), f64::INFINITY);
        sums.add(f64::INFINITY, -1);
        assert_eq!((sums.sum(), sums.variance(1)), (1.5, 0.0));
    }

    /// Compares sums with integers of 128 bits, which are exact if no value is too large or too
    /// small.
    #[test]
    fn random_sums_equal_sums_of_integers() {
        let mut generator = Generator::new(22);
        for _ in 0..300 {
            let mut sums = FloatSums::new(true);
            let mut present: Vec<(f64, i64)> = Vec::new();
            for _ in 0..60 {
                if present.is_empty() || generator.chance(60) {
                    let power = 1_i64 << generator.below(40);
                    let number = (generator.below(1 << 20) as i64 - (1 << 19)) * power;
                    let times = 1 + generator.below(3) as i64 * generator.below(1 << 10) as i64;
                    sums.add(number as f64 / 1024.0, times);
                    present.push((number as f64 / 1024.0, times));
                } else {
                    let (number, times) = present.swap_remove(generator.below(present.len()));
                    sums.add(number, -times);
                }
                let exact =
                    |(number, times): &(f64, i64)| ((number * 1024.0) as i128, i128::from(*times));
                let sum: i128 =
                    present.iter().map(exact).map(|(number, times)| number * times).sum();
                assert_eq!(sums.sum(), sum as f64 / 1024.0, "{present:?}");
                let count: i128 = present.iter().map(exact).map(|(_, times)| times).sum();
                let small = present.iter().all(|(number, _)| number.abs() < 1e9);
                if small && count > 0 {
                    let squares = present.iter().map(exact);
                    let squares: i128 =
                        squares.map(|(number, times)| number * number * times).sum();
                    let numerator = count * squares - sum * sum;
                    let expected = numerator as f64 / (count * count) as f64 / 1024.0 / 1024.0;
                    assert_eq!(sums.variance(count as i64), expected, "{present:?}");
                }
            }
        }
    }

    #[test]
    fn any_floats_are_added_and_removed_in_any_order() {
        let mut generator = Generator::new(7);
        for _ in 0..200 {
            let mut numbers = Vec::new();
            let mut passing = sums(&[]);
            for _ in 0..40 {
                let number = f64::from_bits(generator.number());
                passing.add(number, 1);
                if generator.chance(50) {
                    numbers.push(number);
                } else {
                    passing.add(number, -1);
                }
            }
            numbers.reverse();
            let count = numbers.len().max(1) as i64;
            let mut fresh = sums(&numbers);
            let bits = |sums: &mut FloatSums| {
                [sums.sum(), sums.average(count), sums.variance(count)].map(f64::to_bits)
            };
            assert_eq!(bits(&mut passing), bits(&mut fresh), "{numbers:?}");
        }
    }

    #[test]
    fn digits_are_carried_in_time_and_are_few() {
        let mut sums = FloatSums::new(true);
        for _ in 0..1000 {
            sums.sum.additions = ADDITIONS_MAX - 2;
            sums.add(0.1, i64::MAX);
            sums.add(f64::MAX, 1 << 40);
            sums.add(5e-324, 1);
        }
        assert!(sums.sum.digits.len() <= 72, "{}", sums.sum.digits.len());
        let squares = sums.squares.as_ref().unwrap().digits.len();
        assert!(squares <= 144, "{squares}");
        for _ in 0..1000 {
            sums.add(0.1, -i64::MAX);
            sums.add(f64::MAX, -(1 << 40));
            sums.add(5e-324, -1);
        }
        sums.add(0.5, 1);
        assert_eq!((sums.sum(), sums.variance(1)), (0.5, 0.0));
    }
}

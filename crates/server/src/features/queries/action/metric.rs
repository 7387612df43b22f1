//! An action that makes a query's result the series of a metric.

use std::collections::BTreeMap;

use fathom_cql::Value;

use crate::features::queries::definition::{MetricDefinition, MetricKind, PreparedQuery};
use crate::features::queries::kept::ResultChange;

/// The most distinct values in all series of a gauge together.
const VALUES_MAX: usize = 1 << 16;
/// The longest text of a label, in bytes. Longer texts are cut.
const LABEL_LENGTH_MAX: usize = 512;

/// The values of a series' labels.
type Labels = Vec<String>;

/// The metric of a query.
pub(super) struct Metric {
    definition: MetricDefinition,
    names: Vec<String>,
    value: Option<usize>,
    columns: Vec<usize>,
    gauges: BTreeMap<Labels, BTreeMap<Value, i64>>,
    /// The number of values in `gauges`.
    values: usize,
    counters: BTreeMap<Labels, Sum>,
    /// Rows without a series: for a gauge the current rows, for a counter all rows so far.
    rows_without_series: i64,
}

/// A sum, which is exact for integers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sum {
    whole: i128,
    rest: f64,
}

impl Sum {
    fn add(&mut self, value: &Value, count: i64) {
        match value {
            Value::Integer(number) => {
                let product = i128::from(*number) * i128::from(count);
                self.whole = self.whole.saturating_add(product);
            }
            Value::Float(number) => self.rest += number * count as f64,
            _ => {}
        }
    }

    /// The sum in Prometheus' syntax.
    fn text(self) -> String {
        if self.rest == 0.0 {
            return self.whole.to_string();
        }
        let sum = self.whole as f64 + self.rest;
        match sum {
            _ if sum.is_nan() => "NaN".into(),
            f64::INFINITY => "+Inf".into(),
            f64::NEG_INFINITY => "-Inf".into(),
            sum => sum.to_string(),
        }
    }
}

/// A metric and its series.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct MetricSeries {
    /// The metric's name.
    pub name: String,
    /// The metric's type: `gauge` or `counter`.
    pub kind: &'static str,
    /// The help text.
    pub help: String,
    /// The names of the labels.
    pub labels: Vec<String>,
    /// The series, each with the values of its labels and its own value.
    pub samples: Vec<(Vec<String>, String)>,
}

impl Metric {
    pub fn new(definition: &MetricDefinition, prepared: &PreparedQuery) -> Self {
        let columns = definition.label_columns(prepared);
        Self {
            names: columns.iter().map(|&at| prepared.columns[at].name.clone()).collect(),
            value: definition.value.as_deref().and_then(|name| prepared.column(name)),
            columns,
            definition: definition.clone(),
            gauges: BTreeMap::new(),
            values: 0,
            counters: BTreeMap::new(),
            rows_without_series: 0,
        }
    }

    /// Applies a change.
    ///
    /// # Errors
    /// If a counter would decrease.
    pub fn take(&mut self, change: &ResultChange) -> Result<(), String> {
        let value = match self.value {
            None => Value::Integer(1),
            Some(at) => change.row.get(at).cloned().unwrap_or(Value::Null),
        };
        // Null is an unknown value, which is not shown.
        if value.is_null() {
            return Ok(());
        }
        let label = |&at: &usize| change.row.get(at).map(label).unwrap_or_default();
        let labels = self.columns.iter().map(label).collect();
        match self.definition.kind {
            MetricKind::Gauge => self.set(labels, value, change.count),
            MetricKind::Counter => self.count(labels, &value, change.count)?,
        }
        Ok(())
    }

    fn set(&mut self, labels: Labels, value: Value, count: i64) {
        let full = self.gauges.len() >= self.definition.series_max;
        let has_space = self.values < VALUES_MAX;
        let Some(values) = self.gauges.get_mut(&labels) else {
            if full || !has_space || count < 0 {
                self.rows_without_series = self.rows_without_series.saturating_add(count);
            } else {
                self.gauges.insert(labels, BTreeMap::from([(value, count)]));
                self.values += 1;
            }
            return;
        };
        match values.get_mut(&value) {
            Some(present) => {
                *present = present.saturating_add(count);
                if *present == 0 {
                    values.remove(&value);
                    self.values -= 1;
                }
            }
            None if has_space && count > 0 => {
                values.insert(value, count);
                self.values += 1;
            }
            // A row without a series is inserted or deleted.
            None => self.rows_without_series = self.rows_without_series.saturating_add(count),
        }
        if values.is_empty() {
            self.gauges.remove(&labels);
        }
    }

    fn count(&mut self, labels: Labels, value: &Value, count: i64) -> Result<(), String> {
        let count = count.saturating_abs();
        let is_increase = match value {
            Value::Integer(number) => *number >= 0,
            Value::Float(number) => *number >= 0.0 && number.is_finite(),
            _ => false,
        };
        if !is_increase {
            return Err(format!("a counter only increases, and a row has the value {value}"));
        }
        let full = self.counters.len() >= self.definition.series_max;
        if full && !self.counters.contains_key(&labels) {
            self.rows_without_series = self.rows_without_series.saturating_add(count);
        } else {
            self.counters.entry(labels).or_default().add(value, count);
        }
        Ok(())
    }

    /// Forgets the current rows of a gauge. A counter, which adds up all rows so far, keeps its
    /// sum.
    pub fn forget_rows(&mut self) {
        if self.definition.kind == MetricKind::Gauge {
            self.gauges.clear();
            self.values = 0;
            self.rows_without_series = 0;
        }
    }

    /// The number of series, and the number of rows without a series.
    pub fn counts(&self) -> (u64, u64) {
        let series = self.gauges.len() + self.counters.len();
        (series as u64, u64::try_from(self.rows_without_series).unwrap_or(0))
    }

    /// All series.
    pub fn series(&self) -> MetricSeries {
        let gauges = self.gauges.iter().map(|(labels, values)| {
            let mut sum = Sum::default();
            for (value, count) in values {
                sum.add(value, *count);
            }
            (labels.clone(), sum.text())
        });
        let counters = self.counters.iter().map(|(labels, sum)| (labels.clone(), sum.text()));
        MetricSeries {
            name: self.definition.name.clone(),
            kind: match self.definition.kind {
                MetricKind::Gauge => "gauge",
                MetricKind::Counter => "counter",
            },
            help: self.definition.help.clone(),
            labels: self.names.clone(),
            samples: gauges.chain(counters).collect(),
        }
    }
}

/// Converts a value to the text of a label.
fn label(value: &Value) -> String {
    let mut text = match value {
        Value::Null => String::new(),
        other => other.to_string(),
    };
    if text.len() > LABEL_LENGTH_MAX {
        let end = (0..=LABEL_LENGTH_MAX).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or(0));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::queries::definition::QueryDefinition;

    fn metric(kind: MetricKind, value: Option<&str>, series_max: usize) -> Metric {
        let text = "select VDisk, Path, Size from IOstream [range 1 second]";
        let query = QueryDefinition { text: text.into(), ..QueryDefinition::default() };
        let prepared = PreparedQuery::new(&query).unwrap();
        let definition = MetricDefinition {
            name: "m".into(),
            kind,
            value: value.map(str::to_owned),
            labels: Some(vec!["vdisk".into()]),
            series_max,
            ..MetricDefinition::default()
        };
        Metric::new(&definition, &prepared)
    }

    fn change(count: i64, disk: &str, path: &str, size: Value) -> ResultChange {
        let row = [Value::text(disk), Value::text(path), size];
        ResultChange { time_ns: 1, count, row: row.into() }
    }

    fn samples(metric: &Metric) -> Vec<(String, String)> {
        let all = metric.series().samples.into_iter();
        all.map(|(labels, value)| (labels.join(","), value)).collect()
    }

    fn owned(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(one, other)| ((*one).to_owned(), (*other).to_owned())).collect()
    }

    #[test]
    fn a_gauge_is_the_sum_of_the_current_rows() {
        let mut gauge = metric(MetricKind::Gauge, Some("size"), 2);
        let mut take = |count, disk, size| {
            gauge.take(&change(count, disk, "/x", Value::Integer(size))).unwrap();
            (samples(&gauge), gauge.counts())
        };
        take(1, "a", 8);
        take(2, "a", 16);
        assert_eq!(take(1, "b", i64::MAX).0, owned(&[("a", "40"), ("b", &i64::MAX.to_string())]));
        assert_eq!(take(1, "c", 1).1, (2, 1), "there is no space for a third");
        assert_eq!(take(-2, "a", 16).0[0], ("a".to_owned(), "8".to_owned()));
        assert_eq!(take(-1, "a", 8), (owned(&[("b", &i64::MAX.to_string())]), (1, 1)));
        assert_eq!(take(-1, "c", 1).1, (1, 0), "the row without a series was deleted");
        assert_eq!(take(1, "d", 5).1, (2, 0));
    }

    #[test]
    fn deleted_rows_leave_no_state() {
        let mut gauge = metric(MetricKind::Gauge, Some("Size"), 3);
        let inserts: Vec<ResultChange> = (0..100)
            .map(|number| {
                let size = match number % 4 {
                    0 => Value::Float(f64::INFINITY),
                    1 => Value::Float(f64::NAN),
                    2 => Value::Float(0.1 * f64::from(number)),
                    _ => Value::Integer(i64::from(number)),
                };
                change(1, ["a", "b", "c", "d", "e"][number as usize % 5], "/x", size)
            })
            .collect();
        for change in &inserts {
            gauge.take(change).unwrap();
        }
        assert_eq!(samples(&gauge)[0].1, "NaN");
        for change in &inserts {
            gauge.take(&ResultChange { count: -1, ..change.clone() }).unwrap();
        }
        assert_eq!((samples(&gauge), gauge.counts(), gauge.values), (Vec::new(), (0, 0), 0));
    }

    #[test]
    fn a_counter_never_decreases() {
        let mut counter = metric(MetricKind::Counter, Some("Size"), 2);
        for (disk, size) in [("a", 8), ("a", 8), ("b", 1), ("c", 1)] {
            counter.take(&change(2, disk, "/x", Value::Integer(size))).unwrap();
        }
        counter.take(&change(1, "a", "/x", Value::Null)).unwrap();
        for bad in [Value::Integer(-1), Value::Float(-0.5), Value::Float(f64::INFINITY)] {
            assert!(counter.take(&change(1, "a", "/x", bad)).is_err());
        }
        assert_eq!(samples(&counter), owned(&[("a", "32"), ("b", "2")]));
        assert_eq!(counter.counts(), (2, 2));
        let mut rows = metric(MetricKind::Counter, None, 2);
        rows.take(&change(5, "a", "/x", Value::Null)).unwrap();
        assert_eq!(samples(&rows), owned(&[("a", "5")]));
    }
}

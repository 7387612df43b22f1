//! The configuration of a limit.
//!
//! The keys are those of libvirt's `blkdeviotune` (`total_iops_sec`). Aliases are the names of
//! QEMU's `ThrottleLimits` (`iops-total`) and forms with dashes or underscores. The meanings are
//! those of QEMU.

use std::collections::BTreeSet;
use std::sync::Arc;

use fathom_block::{Kind, Layer};
use fathom_failure::Failure;
use fathom_options::{Bytes, Check, Key};
use serde::{Deserialize, Serialize};

use super::rates::Rates;
use super::{Limit, Scope};
use crate::bucket::Rate;
use crate::kind::{LayerContext, LayerOptions, Rank};

/// The largest rate, and the largest product of a burst's rate and its length.
const RATE_MAX: u64 = 1_000_000_000_000_000;
/// The longest name of a group and the longest pattern, in bytes.
const NAME_LENGTH_MAX: usize = 256;
/// The most patterns and kinds of a limit.
const LIST_MAX: usize = 64;

/// The rate of one resource in one direction, as it is configured.
struct Part {
    /// The names of the keys of the average, the maximum and the length of a burst.
    keys: [&'static str; 3],
    average: u64,
    maximum: u64,
    burst_seconds: u64,
}

impl Part {
    fn rate(&self) -> Rate {
        Rate {
            average: self.average as f64,
            maximum: self.maximum as f64,
            burst_seconds: self.burst_seconds as f64,
        }
    }

    fn check(&self, check: &mut Check<'_>) {
        let [average, maximum, length] = self.keys;
        for (key, value) in [(average, self.average), (maximum, self.maximum)] {
            if value > RATE_MAX {
                check.problem(
                    key,
                    format!("`{key}` has at most the value {RATE_MAX}"),
                    "write a smaller number, or 0 for no limit",
                );
            }
        }
        if self.burst_seconds == 0 {
            check.problem(
                length,
                format!("`{length}` is at least 1 second"),
                "leave it out for bursts of one second",
            );
        }
        if self.maximum > 0 && self.average == 0 {
            check.problem(
                maximum,
                format!("`{maximum}` needs `{average}`"),
                format!("set `{average}` to the rate in the long run"),
            );
        } else if self.maximum > 0 && self.maximum < self.average {
            check.problem(
                maximum,
                format!("`{maximum}` is less than `{average}`"),
                "a burst has at least the rate of the long run: raise it, or leave it out",
            );
        }
        if self.burst_seconds > 1 && self.maximum == 0 {
            check.problem(
                length,
                format!("`{length}` needs `{maximum}`"),
                format!("set `{maximum}` to the rate in a burst"),
            );
        } else if self.maximum.saturating_mul(self.burst_seconds) > RATE_MAX {
            check.problem(
                length,
                format!("`{maximum}` times `{length}` has at most the value {RATE_MAX}"),
                "shorten the burst",
            );
        }
    }
}

/// Declares the keys of all rates, in the order of [`Rates`].
macro_rules! options {
    ($($type:ty, $number:ident: $average:ident [$($a:literal)*] $maximum:ident [$($m:literal)*]
       $length:ident [$($l:literal)*] $what:literal;)*) => {
        /// The configuration of a layer that limits requests and bytes per second. A rate of 0
        /// means no limit.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct LimitOptions {
            $(
                #[doc = concat!("The most ", $what, " per second in the long run.")]
                $(#[serde(alias = $a)])*
                #[serde(skip_serializing_if = "is_default")]
                pub $average: $type,
                #[doc = concat!("The most ", $what, " per second in a burst.")]
                $(#[serde(alias = $m)])*
                #[serde(skip_serializing_if = "is_default")]
                pub $maximum: $type,
                #[doc = concat!("The longest burst of ", $what, ", in seconds.")]
                $(#[serde(alias = $l)])*
                #[serde(skip_serializing_if = "is_one")]
                pub $length: u64,
            )*
            /// A longer request counts as its length divided by this length. 0 counts each request
            /// as one.
            #[serde(alias = "iops-size", alias = "size_iops_sec", alias = "size-iops-sec")]
            #[serde(skip_serializing_if = "is_default")]
            pub iops_size: Bytes,
            /// The name of the group of disks that share the limit; empty for none.
            #[serde(alias = "group_name", alias = "group-name")]
            #[serde(skip_serializing_if = "is_default")]
            pub group: String,
            /// Patterns of the limited control groups of the guest; empty for all requests. `*`
            /// matches any characters, `?` one.
            #[serde(skip_serializing_if = "is_default")]
            pub containers: Vec<String>,
            /// Whether each matching control group has its own limit; otherwise they share it.
            #[serde(skip_serializing_if = "is_default")]
            pub each: bool,
            /// The limited kinds of data; empty for all.
            #[serde(skip_serializing_if = "is_default")]
            pub kinds: Vec<String>,
        }

        impl Default for LimitOptions {
            /// No limit.
            fn default() -> Self {
                Self {
                    $($average: <$type>::default(), $maximum: <$type>::default(), $length: 1,)*
                    iops_size: Bytes(0),
                    group: String::new(),
                    containers: Vec::new(),
                    each: false,
                    kinds: Vec::new(),
                }
            }
        }

        impl LimitOptions {
            /// All rates.
            fn parts(&self) -> [Part; 6] {
                [$(Part {
                    keys: [stringify!($average), stringify!($maximum), stringify!($length)],
                    average: $number(&self.$average),
                    maximum: $number(&self.$maximum),
                    burst_seconds: self.$length,
                },)*]
            }
        }

        const KEYS: &[Key] = &[
            $(
                Key::new(stringify!($average), "0", concat!("the most ", $what, " per second in \
                    the long run; 0 for no limit")).with_aliases(&[$($a),*]),
                Key::new(stringify!($maximum), "0", concat!("the most ", $what, " per second in \
                    a burst")).with_aliases(&[$($m),*]),
                Key::new(stringify!($length), "1", concat!("the longest burst of ", $what,
                    ", in seconds")).with_aliases(&[$($l),*]),
            )*
            Key::new("iops_size", "0", "a longer request counts as its length divided by this length; \
                0 counts each request as one")
                .with_aliases(&["iops-size", "size_iops_sec", "size-iops-sec"]),
            Key::new("group", "\"\"", "the group of disks that share the limit; none by default")
                .with_aliases(&["group_name", "group-name"]),
            Key::new("containers", "[]", "patterns of the limited control groups, with `*` and `?`; all \
                requests by default. Needs `classify`"),
            Key::new("each", "false", "whether each matching control group has its own limit"),
            Key::new("kinds", "[]", "the limited kinds of data; all by default. Needs `classify`"),
        ];
    };
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn is_one(number: &u64) -> bool {
    *number == 1
}

fn plain(number: &u64) -> u64 {
    *number
}

fn bytes(number: &Bytes) -> u64 {
    number.0
}

options! {
    u64, plain: total_iops_sec ["total-iops-sec" "iops_total" "iops-total"]
        total_iops_sec_max ["total-iops-sec-max" "iops_total_max" "iops-total-max"]
        total_iops_sec_max_length ["total-iops-sec-max-length" "iops_total_max_length"
            "iops-total-max-length"] "requests";
    u64, plain: read_iops_sec ["read-iops-sec" "iops_read" "iops-read"]
        read_iops_sec_max ["read-iops-sec-max" "iops_read_max" "iops-read-max"]
        read_iops_sec_max_length ["read-iops-sec-max-length" "iops_read_max_length"
            "iops-read-max-length"] "reads";
    u64, plain: write_iops_sec ["write-iops-sec" "iops_write" "iops-write"]
        write_iops_sec_max ["write-iops-sec-max" "iops_write_max" "iops-write-max"]
        write_iops_sec_max_length ["write-iops-sec-max-length" "iops_write_max_length"
            "iops-write-max-length"] "writes";
    Bytes, bytes: total_bytes_sec ["total-bytes-sec" "bps_total" "bps-total"]
        total_bytes_sec_max ["total-bytes-sec-max" "bps_total_max" "bps-total-max"]
        total_bytes_sec_max_length ["total-bytes-sec-max-length" "bps_total_max_length"
            "bps-total-max-length"] "bytes";
    Bytes, bytes: read_bytes_sec ["read-bytes-sec" "bps_read" "bps-read"]
        read_bytes_sec_max ["read-bytes-sec-max" "bps_read_max" "bps-read-max"]
        read_bytes_sec_max_length ["read-bytes-sec-max-length" "bps_read_max_length"
            "bps-read-max-length"] "bytes read";
    Bytes, bytes: write_bytes_sec ["write-bytes-sec" "bps_write" "bps-write"]
        write_bytes_sec_max ["write-bytes-sec-max" "bps_write_max" "bps-write-max"]
        write_bytes_sec_max_length ["write-bytes-sec-max-length" "bps_write_max_length"
            "bps-write-max-length"] "bytes written";
}

impl LimitOptions {
    /// The rates.
    pub(super) fn rates(&self) -> Rates {
        let rates = self.parts().map(|part| part.rate());
        Rates {
            requests: [rates[0], rates[1], rates[2]],
            bytes: [rates[3], rates[4], rates[5]],
            request_size: self.iops_size.0 as f64,
        }
    }

    /// The selected requests.
    pub(super) fn scope(&self) -> Scope {
        let kinds: BTreeSet<Kind> = Kind::ALL
            .into_iter()
            .filter(|kind| self.kinds.iter().any(|name| name == kind.name()))
            .collect();
        Scope { containers: self.containers.clone(), each: self.each, kinds }
    }
}

impl LayerOptions for LimitOptions {
    const KIND: &'static str = "limit";
    const RANK: Rank = Rank::Limit;
    const BENEATH: Option<&'static str> = Some(
        "it limits the work of the layers above, such as write-back, instead of the guest's requests",
    );
    const MEANING: &'static str = "limits requests and bytes per second, with bursts";
    const KEYS: &'static [Key] = KEYS;
    const HAS_SEVERAL: bool = true;

    fn check(&self, check: &mut Check<'_>) {
        let parts = self.parts();
        for part in &parts {
            part.check(check);
        }
        for resource in parts.chunks(3) {
            let [total, directions @ ..] = resource else { continue };
            for part in directions.iter().filter(|part| total.average > 0 && part.average > 0) {
                let (one, other) = (total.keys[0], part.keys[0]);
                check.problem(
                    other,
                    format!("`{one}` and `{other}` exclude each other"),
                    "limit the total, or reads and writes",
                );
            }
        }
        if self.iops_size.0 > 0 && parts[..3].iter().all(|part| part.average == 0) {
            check.problem(
                "iops_size",
                "`iops_size` needs a limit of requests",
                "set `total_iops_sec`, `read_iops_sec` or `write_iops_sec`",
            );
        }
        let names = self.containers.iter().map(|pattern| ("containers", pattern));
        for (key, name) in names.chain([("group", &self.group)]) {
            if name.len() > NAME_LENGTH_MAX {
                let message = format!("a name in `{key}` has at most {NAME_LENGTH_MAX} bytes");
                check.problem(key, message, "shorten it");
            }
        }
        for (key, count) in [("containers", self.containers.len()), ("kinds", self.kinds.len())] {
            if count > LIST_MAX {
                let message = format!("`{key}` has at most {LIST_MAX} entries");
                check.problem(key, message, "use `*` for several, or leave some out");
            }
        }
        if self.containers.is_empty() && self.each {
            check.problem(
                "each",
                "`each` needs `containers`",
                "write `containers = [\"*\"]` for all control groups",
            );
        }
        if self.each && !self.group.is_empty() {
            check.problem(
                "each",
                "`each` and `group` exclude each other",
                "leave out one: a control group belongs to one guest",
            );
        }
        for kind in &self.kinds {
            if !Kind::ALL.iter().any(|known| known.name() == kind) {
                let names = Kind::ALL.map(Kind::name);
                let shown: String = kind.chars().take(60).collect();
                let message = format!("there is no kind of data {shown:?}");
                check.problem("kinds", message, fathom_options::suggestion(&shown, &names));
            }
        }
    }

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        let limit = Limit::new(self, context.names, context.limits);
        Ok(Some(Arc::new(limit)))
    }

    fn fits(&self, layer: &dyn Layer) -> bool {
        limit(layer).is_some_and(|limit| limit.is_for(self))
    }

    fn apply(&self, layer: &dyn Layer) {
        if let Some(limit) = limit(layer) {
            limit.set_rates(self);
        }
    }
}

/// `layer`, if it is a limit.
fn limit(layer: &dyn Layer) -> Option<&Limit> {
    layer.as_any()?.downcast_ref()
}

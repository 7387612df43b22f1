//! The results of a load.
use std::time::Duration;

use serde::Serialize;

use super::{
    LoadOptions, Measured,
    worker::{Tally, WorkerResult},
};

/// The results of one kind of request.
#[derive(Clone, Debug, Serialize)]
pub struct OperationReport {
    /// Requests completed in the measured time, which each queue counts from one completion to
    /// another.
    pub requests: u64,
    /// Requests per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Mean latency in microseconds. All latencies are 0 without requests.
    pub latency_us_mean: f64,
    /// Median latency, in microseconds.
    pub latency_us_p50: f64,
    /// 90th percentile of the latency, in microseconds.
    pub latency_us_p90: f64,
    /// 99th percentile of the latency, in microseconds.
    pub latency_us_p99: f64,
    /// 99.9th percentile of the latency, in microseconds.
    pub latency_us_p999: f64,
    /// Longest latency, in microseconds.
    pub latency_us_max: f64,
}

/// The results of a load.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    /// The measured time, in seconds.
    pub seconds: f64,
    /// Reads.
    pub reads: OperationReport,
    /// Writes.
    pub writes: OperationReport,
    /// Failed requests, in all phases.
    pub errors: u64,
    /// Blocks compared with the data written to them.
    pub blocks_verified: u64,
    /// Blocks that differed.
    pub blocks_wrong: u64,
    /// The number of the first block that differed.
    pub block_wrong_first: Option<u64>,
    /// The server's process ID, if the process is visible from here.
    pub server_process_id: Option<i32>,
    /// The server's CPU time as a share of one core.
    pub server_cpu_share: Option<f64>,
    /// The server's CPU time per request, in microseconds.
    pub server_cpu_us_per_request: Option<f64>,
    /// This process's CPU time as a share of one core.
    pub client_cpu_share: f64,
    /// The number of times that this process slept for a completion.
    pub client_wakeups: u64,
    /// The number of notifications sent to the server.
    pub client_notifications: u64,
}

impl LoadReport {
    /// Reads and writes per second.
    pub fn iops(&self) -> f64 {
        self.reads.iops + self.writes.iops
    }
}

impl Measured {
    /// Sums up the results of the queues.
    pub(super) fn report(&self, options: &LoadOptions, results: Vec<WorkerResult>) -> LoadReport {
        let (mut reads, mut writes) = (Sum::new(), Sum::new());
        let mut report = LoadReport {
            seconds: self.elapsed.as_secs_f64(),
            reads: reads.report(options.block_size),
            writes: writes.report(options.block_size),
            errors: 0,
            blocks_verified: 0,
            blocks_wrong: 0,
            block_wrong_first: None,
            server_process_id: self.server_process_id,
            server_cpu_share: None,
            server_cpu_us_per_request: None,
            client_cpu_share: self.client_cpu.as_secs_f64() / self.elapsed.as_secs_f64(),
            client_wakeups: 0,
            client_notifications: 0,
        };
        for result in results {
            reads.add(&result.reads, result.measured);
            writes.add(&result.writes, result.measured);
            report.errors += result.errors;
            report.blocks_verified += result.blocks_verified;
            report.blocks_wrong += result.blocks_wrong;
            report.block_wrong_first = report.block_wrong_first.or(result.block_wrong_first);
            report.client_wakeups += result.wakeups;
            report.client_notifications += result.notifications;
        }
        report.reads = reads.report(options.block_size);
        report.writes = writes.report(options.block_size);
        report.server_cpu_share =
            self.server_cpu.map(|cpu| cpu.as_secs_f64() / self.elapsed.as_secs_f64());
        let iops = report.iops();
        report.server_cpu_us_per_request =
            report.server_cpu_share.filter(|_| iops > 0.0).map(|share| share * 1e6 / iops);
        report
    }
}

/// The sum of the queues' results for one kind of request.
struct Sum {
    tally: Tally,
    iops: f64,
}

impl Sum {
    fn new() -> Self {
        Self { tally: Tally::new(), iops: 0.0 }
    }

    fn add(&mut self, tally: &Tally, measured: Duration) {
        self.tally.requests += tally.requests;
        self.tally.latency_ns += &tally.latency_ns;
        if tally.requests > 0 && !measured.is_zero() {
            self.iops += tally.requests as f64 / measured.as_secs_f64();
        }
    }

    fn report(&self, block_size: u32) -> OperationReport {
        let Self { tally, iops } = self;
        let quantile = |q| tally.latency_ns.value_at_quantile(q) as f64 / 1e3;
        OperationReport {
            requests: tally.requests,
            iops: *iops,
            bytes_per_second: iops * f64::from(block_size),
            latency_us_mean: tally.latency_ns.mean() / 1e3,
            latency_us_p50: quantile(0.5),
            latency_us_p90: quantile(0.9),
            latency_us_p99: quantile(0.99),
            latency_us_p999: quantile(0.999),
            latency_us_max: tally.latency_ns.max() as f64 / 1e3,
        }
    }
}

//! Puts a vhost-user disk under load: `load SOCKET [key=value …]`.
//!
//! Keys: `reads` (percent), `size`, `depth`, `queues`, `seconds`, `warmup`, `range` (bytes),
//! `order` (random, sequential), `wait` (event, poll), `verify` (true), `seed`.
use std::{env, io::Write, process::ExitCode, time::Duration};

use fathom_console::load::{BlockOrder, LoadOptions, Waiting, load};

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let Some(socket) = arguments.next() else {
        eprintln!("usage: load SOCKET [reads=100] [size=4096] [depth=1] [queues=1] [seconds=3]");
        eprintln!(
            "       [warmup=0.3] [range=BYTES] [order=random] [wait=event] [verify=false] [seed=1]"
        );
        return ExitCode::from(2);
    };
    let mut options = LoadOptions::new(socket);
    for argument in arguments {
        if let Err(error) = set(&mut options, &argument) {
            eprintln!("{argument}: {error}");
            return ExitCode::from(2);
        }
    }
    match load(&options) {
        Ok(report) => {
            let text = serde_json::to_string_pretty(&report).expect("a report is plain data");
            // A broken pipe is no error: the reader has read enough.
            let _ = writeln!(std::io::stdout(), "{text}");
            ExitCode::from(u8::from(report.errors > 0 || report.blocks_wrong > 0))
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn set(options: &mut LoadOptions, argument: &str) -> Result<(), Box<dyn std::error::Error>> {
    let (key, value) = argument.split_once('=').ok_or("expected key=value")?;
    match key {
        "reads" => options.read_percent = value.parse()?,
        "size" => options.block_size = value.parse()?,
        "depth" => options.depth = value.parse()?,
        "queues" => options.queues = value.parse()?,
        "seconds" => options.duration = Duration::try_from_secs_f64(value.parse()?)?,
        "warmup" => options.warmup = Duration::try_from_secs_f64(value.parse()?)?,
        "range" => options.range = Some(0..value.parse()?),
        "verify" => options.verify = value.parse()?,
        "seed" => options.seed = value.parse()?,
        "order" if value == "sequential" => options.order = BlockOrder::Sequential,
        "order" if value == "random" => options.order = BlockOrder::Random,
        "wait" if value == "event" => options.waiting = Waiting::Event,
        "wait" if value == "poll" => options.waiting = Waiting::Poll,
        _ => return Err("unknown key or value".into()),
    }
    Ok(())
}

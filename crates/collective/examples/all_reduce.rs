//! Measures all-reduce between two processes of one host, through shared memory, or over TCP on the loopback interface.
//!
//! `cargo run --release -p engram-collective --example all_reduce [-- tcp [STREAMS]]`
//!
//! Prints the best and the median time per size, and the bus bandwidth `2 (n - 1) / n S / t`. Each result is verified. With the variable
//! `ENGRAM_JSON` it prints one object per size, with milliseconds, for `cargo xtask bench reduce`.

use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use engram_collective::cost::Link;
use engram_collective::executor::{Executor, Plan, Reduction};
use engram_collective::transport::{Tcp, TcpOptions, Wait};

/// Name, elements and repetitions of each size.
const SIZES: [(&str, usize, usize); 4] =
    [("4 kB", 1 << 10, 4_000), ("1 MB", 1 << 18, 400), ("16 MB", 1 << 22, 40), ("64 MB", 1 << 24, 20)];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, child, address, streams] = &arguments[..]
        && child == "--rank-1"
    {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let own = listener.local_addr()?;
        return run(1, &[address.parse()?, own], &listener, streams.parse()?);
    }
    // 0 streams stand for shared memory.
    let streams = match &arguments[1..] {
        [] => 0,
        [kind] if kind == "tcp" => 1,
        [kind, streams] if kind == "tcp" => streams.parse()?,
        _ => return Err("usage: all_reduce [tcp [STREAMS]]".into()),
    };
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = listener.local_addr()?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--rank-1", &own.to_string(), &streams.to_string()])
        .stdout(Stdio::null())
        .spawn()?;
    // Rank 0 only accepts: it does not use the address of rank 1.
    run(0, &[own, own], &listener, streams)?;
    child.wait()?;
    Ok(())
}

fn run(
    rank: usize,
    addresses: &[SocketAddr],
    listener: &TcpListener,
    streams: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let shared_memory = streams == 0;
    let options = TcpOptions {
        streams: streams.max(1),
        connect: Duration::from_secs(10),
        shared_memory,
        ..TcpOptions::default()
    };
    let mut transport = Tcp::connect(rank, 1, addresses, listener, None, options)?;
    assert_eq!(transport.shared_connections(), usize::from(shared_memory), "connections through shared memory");
    let cancel = AtomicBool::new(false);
    let mut give_up = |_: usize| false;
    let mut executor = Executor::new();
    let mut step = 0;
    for (name, elements, repetitions) in SIZES {
        let algorithm = Link::LOOPBACK.choose(2, 4 * elements, true);
        let plan = Plan::new(algorithm, rank, elements, &[1.0, 1.0]);
        let input: Vec<f32> = (0..elements).map(|index| (index % 1_000) as f32 + rank as f32).collect();
        let mut output = vec![0.0; elements];
        let mut times = Vec::with_capacity(repetitions);
        for repetition in 0..repetitions + repetitions.div_ceil(10) {
            step += 1;
            let reduction = Reduction { generation: 1, step, bucket: 0 };
            let mut wait = Wait::new(Duration::from_secs(10), &cancel, &mut give_up);
            let start = Instant::now();
            executor.all_reduce(&mut transport, reduction, &plan, &input, &mut output, &mut wait)?;
            let right = |(index, value): (usize, &f32)| *value == 2.0 * (index % 1_000) as f32 + 1.0;
            // Within the measured time: nothing is left to be done afterwards.
            assert!(output.iter().enumerate().step_by(99_991).all(right), "sum of {name}");
            // The first tenth warms up.
            if repetition >= repetitions.div_ceil(10) {
                times.push(start.elapsed().as_secs_f64());
            }
            assert!(output.iter().enumerate().step_by(997).all(right), "sum of {name}");
            output.iter_mut().step_by(997).for_each(|it| *it = f32::NAN);
        }
        assert!(!times.is_empty());
        times.sort_by(f64::total_cmp);
        let (best, median) = (times[0], times[times.len() / 2]);
        if std::env::var_os("ENGRAM_JSON").is_some() {
            let (bytes, repeats) = (4 * elements, times.len());
            let (best, median) = (1e3 * best, 1e3 * median);
            println!(r#"{{"bytes": {bytes}, "best": {best}, "median": {median}, "repeats": {repeats}}}"#);
            continue;
        }
        let rate = |seconds: f64| 4.0 * elements as f64 / seconds / 1e9;
        println!(
            "{name:>6} {algorithm:?}: best {:8.3} ms {:6.2} GB/s, median {:8.3} ms {:6.2} GB/s",
            1e3 * best,
            rate(best),
            1e3 * median,
            rate(median),
        );
    }
    Ok(())
}

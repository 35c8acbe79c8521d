//! The report of ptxas (`-Xptxas -v`), and the register budgets of the kernels.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};

/// Resource usage of one kernel on one architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) kernel: String,
    pub(super) architecture: String,
    pub(super) registers: u32,
    /// Spilled bytes, stores and loads.
    pub(super) spilled_bytes: u32,
}

/// Maximum registers by kernel.
pub(super) type Budget = BTreeMap<String, u32>;

/// Parses the report.
///
/// # Errors
/// When it does not have the format of ptxas 13.0.
pub(super) fn parse(text: &str) -> Result<Vec<Usage>> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in text.lines() {
        let number = |word: &str| -> Result<u32> {
            let before = line.split(word).next().unwrap_or_default();
            let number = before.split(|c: char| !c.is_ascii_digit()).rfind(|part| !part.is_empty());
            number.and_then(|number| number.parse().ok()).with_context(|| format!("no number in {line:?}"))
        };
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let words: Vec<_> = rest.split('\'').collect();
            ensure!(words.len() >= 3, "no architecture in {line:?}");
            let (kernel, architecture) = (words[0].to_owned(), words[2].to_owned());
            usages.push(Usage { kernel, architecture, registers: 0, spilled_bytes: 0 });
        } else if line.contains("bytes spill stores") {
            let last = usages.last_mut().context("spill report without a kernel")?;
            last.spilled_bytes = number(" bytes spill stores")? + number(" bytes spill loads")?;
        } else if line.contains("Used ") && line.contains(" registers") {
            usages.last_mut().context("register report without a kernel")?.registers = number(" registers")?;
        }
    }
    Ok(usages)
}

/// Parses `registers.toml`: `kernel = registers` lines.
///
/// # Errors
/// When a line has another format.
pub(super) fn budget(text: &str) -> Result<Budget> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let entry = |line: &str| -> Result<(String, u32)> {
        let (kernel, registers) = line.split_once('=').with_context(|| format!("not an entry: {line:?}"))?;
        Ok((kernel.trim().to_owned(), registers.trim().parse().with_context(|| format!("no number: {line:?}"))?))
    };
    lines.filter(|line| !line.is_empty()).map(entry).collect()
}

/// Checks that nothing spills, that every kernel has a budget, and that it is met.
///
/// # Errors
/// All violations.
pub(super) fn check(usages: &[Usage], budget: &Budget, architectures: usize) -> Result<()> {
    let (mut errors, mut unknown) = (Vec::new(), Vec::new());
    for Usage { kernel, architecture, registers, spilled_bytes } in usages {
        if *spilled_bytes > 0 {
            errors.push(format!("{kernel} spills {spilled_bytes} bytes on {architecture}"));
        }
        match budget.get(kernel) {
            None => unknown.push(format!("{kernel} has no register budget")),
            Some(most) if registers > most => {
                errors
                    .push(format!("{kernel} uses {registers} registers on {architecture}, at most {most} are allowed"));
            }
            Some(_) => {}
        }
    }
    for kernel in budget.keys() {
        let architectures_seen: BTreeSet<_> =
            usages.iter().filter(|it| it.kernel == *kernel).map(|it| &it.architecture).collect();
        if architectures_seen.len() != architectures {
            errors.push(format!("{kernel} has a budget, but was built for {} architectures", architectures_seen.len()));
        }
    }
    unknown.sort();
    unknown.dedup();
    errors.append(&mut unknown);
    ensure!(errors.is_empty(), "{}", errors.join("; "));
    Ok(())
}

/// Formats registers by kernel and architecture.
pub(super) fn table(usages: &[Usage], budget: &Budget) -> String {
    let mut rows = BTreeMap::<_, Vec<_>>::new();
    for usage in usages {
        rows.entry(&usage.kernel).or_default().push(format!("{} {}", usage.architecture, usage.registers));
    }
    let mut text = String::from("registers by kernel (budget): by architecture\n");
    for (kernel, mut columns) in rows {
        columns.sort_by_key(|column| (column.find(' '), column.clone()));
        let most = budget.get(kernel).map_or_else(|| "?".to_owned(), u32::to_string);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {kernel:18} ({most:>3}): {}", columns.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'fold' for 'sm_90'\n\
        ptxas info    : Function properties for fold\n\
        \u{20}   8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
        ptxas info    : Used 20 registers, used 1 barriers, 376 bytes cmem[0]\n\
        ptxas info    : Compiling entry function 'fold' for 'sm_80'\n\
        \u{20}   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 33 registers, used 0 barriers\n";

    #[test]
    fn spills_and_exceeded_budgets_are_reported() {
        let usages = parse(SAID).unwrap();
        let architectures_seen: Vec<_> = usages.iter().map(|it| (it.registers, it.spilled_bytes)).collect();
        assert_eq!(architectures_seen, [(20, 16), (33, 0)]);
        let error = check(&usages, &budget("fold = 32 # of 255\n").unwrap(), 2).unwrap_err().to_string();
        assert_eq!(error, "fold spills 16 bytes on sm_90; fold uses 33 registers on sm_80, at most 32 are allowed");
        let error = check(&usages[1..], &budget("fold = 40\ngone = 5").unwrap(), 1).unwrap_err().to_string();
        assert_eq!(error, "gone has a budget, but was built for 0 architectures");
        assert!(check(&usages[1..], &Budget::new(), 1).unwrap_err().to_string().contains("no register budget"));
    }
}

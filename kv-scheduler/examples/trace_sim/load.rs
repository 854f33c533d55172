//! What arrives when: recorded traces, and a closed loop of long answers.

use std::fmt;
use std::time::SystemTime;

use kv_core::Span;
use kv_core::testing::Rng;
use serde::Deserialize;

/// One request of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    /// When it arrives, counted from the first one.
    pub(crate) at: Span,
    /// Prompt tokens, at least 1.
    pub(crate) input_tokens: u32,
    /// Answer tokens, at least 1.
    pub(crate) output_tokens: u32,
}

/// Requests in the order of arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    /// The requests.
    pub(crate) jobs: Vec<Job>,
    /// Most requests that clients have open at the same time; the next one is sent when one ends.
    /// `None` sends every request at its time, whatever became of the others.
    pub(crate) concurrency: Option<usize>,
}

/// A closed loop in which everybody starts at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClosedLoop {
    /// How many requests in all.
    pub(crate) requests: usize,
    /// Most that are open at the same time.
    pub(crate) concurrency: usize,
    /// Mean prompt tokens.
    pub(crate) input_tokens: u32,
    /// Mean answer tokens.
    pub(crate) output_tokens: u32,
    /// Lengths differ from their mean by at most that many percent, evenly spread.
    pub(crate) spread_percent: u32,
}

impl ClosedLoop {
    /// Draws the lengths.
    pub(crate) fn draw(&self, seed: u64) -> Load {
        let mut rng = Rng::new(seed);
        let mut around = |mean: u32| {
            let most_off = u64::from(mean) * u64::from(self.spread_percent.min(100)) / 100;
            let drawn = u64::from(mean) - most_off + rng.below(2 * most_off + 1);
            u32::try_from(drawn).unwrap_or(u32::MAX).max(1)
        };
        let jobs = (0..self.requests)
            .map(|_| Job {
                at: Span::ZERO,
                input_tokens: around(self.input_tokens),
                output_tokens: around(self.output_tokens),
            })
            .collect();
        Load {
            jobs,
            concurrency: Some(self.concurrency),
        }
    }
}

/// A trace that can't be read; lines are counted from 1.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// There is no request in it.
    #[error("the trace has no requests")]
    Empty,
    /// The first line is of neither format.
    #[error(
        "line 1 is neither a JSON object (Mooncake) nor the header `{AZURE_HEADER}` (Azure): {found}"
    )]
    Format {
        /// The line, shortened.
        found: Shortened,
    },
    /// A line of the Mooncake format that is no such object.
    #[error("line {line}: {source}")]
    Json {
        /// Which line.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A line of the Azure format with too few or too many columns.
    #[error("line {line}: {found} columns, must be 3: {text}")]
    Columns {
        /// Which line.
        line: usize,
        /// How many there are.
        found: usize,
        /// The line, shortened.
        text: Shortened,
    },
    /// A time that is none.
    #[error("line {line}: TIMESTAMP is {text}: {source}")]
    Timestamp {
        /// Which line.
        line: usize,
        /// The field.
        text: Shortened,
        /// What is wrong.
        source: humantime::TimestampError,
    },
    /// A number of tokens that is none, or is 0.
    #[error("line {line}: {column} is {text}, must be between 1 and {most}", most = u32::MAX)]
    Tokens {
        /// Which line.
        line: usize,
        /// Which column.
        column: &'static str,
        /// The field.
        text: Shortened,
    },
}

/// Text of a trace as it is shown in an error: in quotes, at most 60 characters of it.
#[derive(Debug)]
pub(crate) struct Shortened(String);

impl Shortened {
    fn new(text: &str) -> Self {
        Self(text.chars().take(60).collect())
    }
}

impl fmt::Display for Shortened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// The first line of an Azure trace.
const AZURE_HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// A line of a Mooncake trace. The ids of its prompt's blocks are left out: the engine shares
/// nothing between requests.
#[derive(Debug, Deserialize)]
struct MooncakeLine {
    /// Milliseconds.
    timestamp: u64,
    input_length: u64,
    output_length: u64,
}

/// Reads a trace of either format; which one, the first line tells.
///
/// # Errors
///
/// [`TraceError`] names the first line that can't be read.
pub(crate) fn parse(text: &str) -> Result<Load, TraceError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let first = text.lines().next().ok_or(TraceError::Empty)?;
    let mut jobs = if first.trim_start().starts_with('{') {
        mooncake(text)?
    } else if first.trim() == AZURE_HEADER {
        azure(text)?
    } else {
        let found = Shortened::new(first);
        return Err(TraceError::Format { found });
    };
    jobs.sort_by_key(|job| job.at);
    let start = jobs.first().ok_or(TraceError::Empty)?.at;
    for job in &mut jobs {
        job.at = Span::from_nanos(job.at.as_nanos() - start.as_nanos());
    }
    Ok(Load {
        jobs,
        concurrency: None,
    })
}

/// Lines that hold something, with their numbers.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = (1..).zip(text.lines().map(str::trim));
    numbered.filter(|(_, line)| !line.is_empty())
}

fn mooncake(text: &str) -> Result<Vec<Job>, TraceError> {
    let tokens = |line, column, count: u64| {
        let fits = u32::try_from(count).ok().filter(|&count| count > 0);
        fits.ok_or_else(|| TraceError::Tokens {
            line,
            column,
            text: Shortened::new(&count.to_string()),
        })
    };
    lines(text)
        .map(|(line, text)| {
            let read: MooncakeLine =
                serde_json::from_str(text).map_err(|source| TraceError::Json { line, source })?;
            Ok(Job {
                at: Span::from_millis(read.timestamp),
                input_tokens: tokens(line, "input_length", read.input_length)?,
                output_tokens: tokens(line, "output_length", read.output_length)?,
            })
        })
        .collect()
}

fn azure(text: &str) -> Result<Vec<Job>, TraceError> {
    let tokens = |line, column, field: &str| {
        let count = field.parse::<u32>().ok().filter(|&count| count > 0);
        count.ok_or_else(|| TraceError::Tokens {
            line,
            column,
            text: Shortened::new(field),
        })
    };
    lines(text)
        .skip(1)
        .map(|(line, text)| {
            let columns: Vec<&str> = text.split(',').map(str::trim).collect();
            let &[time, input, output] = columns.as_slice() else {
                return Err(TraceError::Columns {
                    line,
                    found: columns.len(),
                    text: Shortened::new(text),
                });
            };
            let at =
                humantime::parse_rfc3339_weak(time).map_err(|source| TraceError::Timestamp {
                    line,
                    text: Shortened::new(time),
                    source,
                })?;
            // The parser reads nothing before 1970.
            let since_epoch = at.duration_since(SystemTime::UNIX_EPOCH);
            Ok(Job {
                at: since_epoch.unwrap_or_default().into(),
                input_tokens: tokens(line, "ContextTokens", input)?,
                output_tokens: tokens(line, "GeneratedTokens", output)?,
            })
        })
        .collect()
}

impl Load {
    /// Keeps the first `limit` requests.
    pub(crate) fn limit(&mut self, limit: usize) {
        self.jobs.truncate(limit);
    }

    /// Lets requests arrive `factor` times as often.
    pub(crate) fn scale(&mut self, factor: f64) {
        for job in &mut self.jobs {
            let at = job.at.as_duration().as_secs_f64() / factor;
            job.at = crate::cost::span(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(at_millis: u64, input_tokens: u32, output_tokens: u32) -> Job {
        Job {
            at: Span::from_millis(at_millis),
            input_tokens,
            output_tokens,
        }
    }

    #[test]
    fn mooncake_lines_are_read_and_start_at_zero() {
        let text = concat!(
            r#"{"timestamp": 3000, "input_length": 9, "output_length": 5, "hash_ids": [46]}"#,
            "\n\n",
            r#"{"timestamp": 1000, "input_length": 7, "output_length": 2, "hash_ids": []}"#,
            "\n",
        );
        let load = parse(text).unwrap();
        assert_eq!(load.jobs, [job(0, 7, 2), job(2_000, 9, 5)]);
        assert_eq!(load.concurrency, None);
    }

    #[test]
    fn azure_lines_are_read_with_their_fractions() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                    2023-11-16 23:59:59.7500000,374,44\r\n\
                    2023-11-17 00:00:00.9951690,396,109\r\n";
        let load = parse(text).unwrap();
        assert_eq!(load.jobs[0], job(0, 374, 44));
        assert_eq!(load.jobs[1].at, Span::from_nanos(1_245_169_000));
        assert_eq!(load.jobs.len(), 2);
    }

    #[test]
    fn errors_name_the_line_and_what_is_wrong() {
        let mooncake = r#"{"timestamp": 0, "input_length": 1, "output_length": 1}"#;
        let azure = AZURE_HEADER;
        let time = "2023-11-16 18:15:46.68";
        let cases = [
            (String::new(), "the trace has no requests"),
            (azure.to_owned(), "the trace has no requests"),
            (
                "a,b\n".to_owned(),
                "line 1 is neither a JSON object (Mooncake) nor the header \
                 `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure): \"a,b\"",
            ),
            (
                format!("{mooncake}\n{{\"timestamp\": 0}}"),
                "line 2: missing field `input_length` at line 1 column 16",
            ),
            (
                format!("{mooncake}\n\n{mooncake}")
                    .replace("_length\": 1}\n\n", "_length\": 0}\n\n"),
                "line 1: output_length is \"0\", must be between 1 and 4294967295",
            ),
            (
                format!("{azure}\n{time},5\n"),
                "line 2: 2 columns, must be 3: \"2023-11-16 18:15:46.68,5\"",
            ),
            (
                format!("{azure}\n{time},5,6\n{time},-5,6\n"),
                "line 3: ContextTokens is \"-5\", must be between 1 and 4294967295",
            ),
            (
                format!("{azure}\n{time},5,0\n"),
                "line 2: GeneratedTokens is \"0\", must be between 1 and 4294967295",
            ),
            (
                format!("{azure}\nyesterday,5,6\n"),
                "line 2: TIMESTAMP is \"yesterday\": timestamp format is invalid",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(&text).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn scale_and_limit() {
        let mut load = Load {
            jobs: vec![job(0, 1, 1), job(100, 1, 1), job(200, 1, 1)],
            concurrency: None,
        };
        load.scale(2.0);
        load.limit(2);
        assert_eq!(load.jobs, [job(0, 1, 1), job(50, 1, 1)]);
    }

    #[test]
    fn lengths_of_the_closed_loop_keep_to_their_spread() {
        let shape = ClosedLoop {
            requests: 500,
            concurrency: 128,
            input_tokens: 1_000,
            output_tokens: 2_500,
            spread_percent: 20,
        };
        let load = shape.draw(1);
        assert_eq!(load, shape.draw(1));
        assert_ne!(load, shape.draw(2));
        let inputs = load.jobs.iter().map(|job| job.input_tokens);
        let outputs = load.jobs.iter().map(|job| job.output_tokens);
        assert!(inputs.clone().all(|tokens| (800..=1_200).contains(&tokens)));
        assert!(
            outputs
                .clone()
                .all(|tokens| (2_000..=3_000).contains(&tokens))
        );
        assert!(inputs.min() < Some(850) && outputs.max() > Some(2_950));
    }
}

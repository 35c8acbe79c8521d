//! Drawing: lines and bars as SVG that takes its colours from the page around it.
//!
//! The plotting library writes colours as numbers. Each ink is a number that represents a colour of the page's style sheet and is
//! replaced by it afterwards, so that one drawing fits light and dark mode.

use super::ReportError;
use super::format::escape;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::fmt::Write;

/// The library draws on whole units. Several to a pixel keep slopes smooth.
const PIXEL: u32 = 5;
/// Size of a drawing; the page scales it to its width.
const WIDTH: u32 = 1_000 * PIXEL;
const HEIGHT: u32 = 330 * PIXEL;
/// Size of letters.
const LETTERS: u32 = 13 * PIXEL;

/// Meaning of a stroke.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ink {
    Axis,
    Grid,
    Memory,
    Frequent,
    Recent,
    Rewarded,
    Punished,
}

impl Ink {
    const ALL: [Self; 7] =
        [Self::Axis, Self::Grid, Self::Memory, Self::Frequent, Self::Recent, Self::Rewarded, Self::Punished];

    /// The variable of the style sheet.
    pub(crate) const fn variable(self) -> &'static str {
        match self {
            Self::Axis => "--axis",
            Self::Grid => "--grid",
            Self::Memory => "--memory",
            Self::Frequent => "--frequent",
            Self::Recent => "--recent",
            Self::Rewarded => "--rewarded",
            Self::Punished => "--punished",
        }
    }

    const fn colour(self) -> RGBColor {
        RGBColor(1, 2, self as u8 + 1)
    }

    fn literal(self) -> String {
        let RGBColor(red, green, blue) = self.colour();
        format!("\"#{red:02X}{green:02X}{blue:02X}\"")
    }
}

/// A line of a chart.
pub(crate) struct Line {
    pub(crate) ink: Ink,
    /// Points in order of x, or a closed outline, whose inside is filled.
    pub(crate) points: Vec<(f64, f64)>,
    /// Width of the stroke in pixels, and how opaque it is.
    pub(crate) width: u32,
    pub(crate) opacity: f64,
}

impl Line {
    /// Whether it ends where it starts.
    pub(crate) fn is_outline(&self) -> bool {
        self.points.len() > 2 && self.points.first() == self.points.last()
    }
}

/// Tooltip for a range of x.
pub(crate) struct Hint {
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) text: String,
}

/// A chart without its contents.
pub(crate) struct Frame<'a> {
    /// Unique in the page.
    pub(crate) id: &'a str,
    pub(crate) title: &'a str,
    pub(crate) description: &'a str,
    pub(crate) x: (f64, f64),
    pub(crate) y: (f64, f64),
    pub(crate) x_label: &'a dyn Fn(f64) -> String,
    pub(crate) y_label: &'a dyn Fn(f64) -> String,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plot<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

impl Frame<'_> {
    /// Draws lines, later ones over earlier ones.
    pub(crate) fn lines(&self, lines: &[Line], hints: &[Hint]) -> Result<String, ReportError> {
        self.draw(hints, |plot| {
            for line in lines {
                if line.is_outline() {
                    let fill = line.ink.colour().mix(line.opacity).filled();
                    let area = [Polygon::new(line.points.clone(), fill)];
                    plot.draw_series(area).map_err(|e| e.to_string())?;
                    continue;
                }
                let style = line.ink.colour().mix(line.opacity).stroke_width(line.width * PIXEL);
                plot.draw_series(LineSeries::new(line.points.iter().copied(), style)).map_err(|e| e.to_string())?;
            }
            Ok(())
        })
    }

    /// Draws bars (from x, to x, height) from the lower edge.
    pub(super) fn bars(&self, bars: &[(Ink, f64, f64, f64)], hints: &[Hint]) -> Result<String, ReportError> {
        self.draw(hints, |plot| {
            let bar = |&(ink, from, to, height): &(Ink, f64, f64, f64)| {
                Rectangle::new([(from, self.y.0), (to, height)], ink.colour().mix(0.85).filled())
            };
            plot.draw_series(bars.iter().map(bar)).map(drop).map_err(|e| e.to_string())
        })
    }

    fn draw(
        &self,
        hints: &[Hint],
        contents: impl FnOnce(&mut Plot<'_, '_>) -> Result<(), String>,
    ) -> Result<String, ReportError> {
        let mut svg = String::new();
        let failed = |cause: String| ReportError { chart: self.title.to_owned(), cause };
        let bands = {
            let root: Area<'_> = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
            let mut plot = ChartBuilder::on(&root)
                .margin_top(10 * PIXEL)
                .margin_right(24 * PIXEL)
                .x_label_area_size(34 * PIXEL)
                .y_label_area_size(64 * PIXEL)
                .build_cartesian_2d(self.x.0..self.x.1, self.y.0..self.y.1)
                .map_err(|e| failed(e.to_string()))?;
            self.mesh(&mut plot).map_err(failed)?;
            contents(&mut plot).map_err(failed)?;
            let bands = hints.iter().map(|hint| self.band(&plot, hint)).collect::<String>();
            root.present().map_err(|e| failed(e.to_string()))?;
            bands
        };
        Ok(self.styled(&svg, &bands))
    }

    fn mesh(&self, plot: &mut Plot<'_, '_>) -> Result<(), String> {
        let letters = ("sans-serif", LETTERS).into_font().color(&Ink::Axis.colour());
        plot.configure_mesh()
            .disable_x_mesh()
            .max_light_lines(0)
            .bold_line_style(Ink::Grid.colour().stroke_width(PIXEL))
            .axis_style(Ink::Grid.colour().stroke_width(PIXEL))
            .label_style(letters)
            .set_all_tick_mark_size(5 * PIXEL)
            .x_labels(14)
            .y_labels(6)
            .x_label_formatter(&|x| (self.x_label)(*x))
            .y_label_formatter(&|y| (self.y_label)(*y))
            .draw()
            .map_err(|e| e.to_string())
    }

    fn band(&self, plot: &Plot<'_, '_>, hint: &Hint) -> String {
        let (left, bottom) = plot.backend_coord(&(hint.from.max(self.x.0), self.y.0));
        let (right, top) = plot.backend_coord(&(hint.to.min(self.x.1), self.y.1));
        let (width, height) = ((right - left).max(1), bottom - top);
        let text = escape(&hint.text);
        format!(
            r#"<rect class="band" x="{left}" y="{top}" width="{width}" height="{height}"><title>{text}</title></rect>"#
        )
    }

    /// Returns the drawing with the page's colours, an accessible title and description, and its hints.
    fn styled(&self, svg: &str, bands: &str) -> String {
        let inside = svg.find("<svg").and_then(|start| svg[start..].find('>').map(|end| &svg[start + end + 1..]));
        let mut inside = inside.and_then(|rest| rest.rsplit_once("</svg>")).map_or(svg, |parts| parts.0).to_owned();
        for ink in Ink::ALL {
            inside = inside.replace(&ink.literal(), &format!("\"var({})\"", ink.variable()));
        }
        let (id, title, description) = (self.id, escape(self.title), escape(self.description));
        let mut text = String::with_capacity(inside.len() + bands.len() + 512);
        write!(text, r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{id}-title {id}-text">"#)
            .and_then(|()| {
                write!(text, r#"<title id="{id}-title">{title}</title><desc id="{id}-text">{description}</desc>"#)
            })
            .and_then(|()| write!(text, "{}{bands}</svg>", inside.trim()))
            .expect("a string takes whatever is written to it");
        text
    }
}
